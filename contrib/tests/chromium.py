"""A real browser."""

import shutil
from contextlib import contextmanager

import pytest

CHOOSE = """
const input = document.createElement("input");
input.type = "file";
document.body.append(input);
return input;
"""
DROP = """
const transfer = new DataTransfer(), [input] = arguments;
transfer.items.add(input.files[0]);
input.remove();
document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
"""

FLAGS = """
headless=new no-sandbox disable-gpu disable-background-networking disable-component-update
disable-sync no-first-run window-size=1440,1000
"""


def drop(browser, path):
    """Drop a file on the page."""
    chosen = browser.execute_script(CHOOSE)
    chosen.send_keys(str(path.resolve()))
    browser.execute_script(DROP, chosen)


@contextmanager
def started(profile, width=1440):
    """Chromium without a window, driven by selenium. Skips the test where it is not installed.

    Args:
        profile: folder for its files.
        width: of the screen in pixels.
    """
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("runs in Chromium, with chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        if width != 1440:
            screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.set_script_timeout(120)
        yield browser
    finally:
        browser.quit()
