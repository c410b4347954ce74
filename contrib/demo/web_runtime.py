"""The files of onnxruntime-web that a page needs to run a network: fetched by npm, checked and kept."""

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from cait import disk
from cait.errors import UserError, one_line

VERSION = "1.30.0"
PACKAGE = f"onnxruntime-web@{VERSION}"
TARBALL = f"onnxruntime-web-{VERSION}.tgz"
FILES = {
    "ort.wasm.bundle.min.mjs": "sha512-"
    "1KcF8CWAZeqtTcvLgKPtOMXIbkWeh++LDCQpDhQ5ARVxHAL1VNL5rr0OI+MxTbmNIANldE/A/q+O4gSKgSMjWQ==",
    "ort-wasm-simd-threaded.wasm": "sha512-"
    "Gt7e1iIDIZ/PXEhM/OVleqWHVom0kEI/hs8cod0crXcV9jDGM39B23HuQnlOOgDOC3x4k5pxIgtdgzaL9up3MA==",
}
"""The files in dist/ of the package, and their hashes in the form of subresource integrity."""


def files(given: Path | None) -> dict[str, bytes]:
    """The contents of the files by name, from the package's folder or its .tgz that is `given`.

    None takes those in ~/.cache/cait, where npm fetches them once. Raises UserError if there is no npm, it cannot fetch
    the package, or what was given or fetched is of another version.
    """
    package = given or _cache()
    if not given and not all((package / name).is_file() for name in FILES):
        _fetch(package)
    try:
        contents = _read_folder(package) if package.is_dir() else _read_tarball(package)
    except (OSError, KeyError, AttributeError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{package} is not the package {PACKAGE}: {one_line(error)}") from error
    for name, content in contents.items():
        digest = base64.b64encode(hashlib.sha512(content).digest())
        if FILES[name] != f"sha512-{digest.decode()}":
            raise UserError(
                f"{name} in {package} is not that of {PACKAGE}; `npm pack {PACKAGE}` fetches the package"
            )
    return contents


def _read_folder(folder: Path) -> dict[str, bytes]:
    inner = folder / "dist" if (folder / "dist").is_dir() else folder
    return {name: (inner / name).read_bytes() for name in FILES}


def _read_tarball(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {name: tar.extractfile(f"package/dist/{name}").read() for name in FILES}  # type: ignore[union-attr]


def _cache() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "cait/onnxruntime-web"
        / VERSION
    )


def _fetch(cache: Path) -> None:
    """Put the files into the cache, once they are checked."""
    npm = shutil.which("npm")
    if not npm:
        raise UserError(
            f"there is no npm here, which fetches {PACKAGE}: run `npm pack {PACKAGE}` where there is one, "
            f"and add --runtime {TARBALL}"
        )
    with TemporaryDirectory(prefix="cait-npm-") as scratch:
        done = subprocess.run(
            [npm, "pack", PACKAGE, "--silent"], cwd=scratch, capture_output=True, text=True
        )
        if done.returncode:
            *_, reason = (done.stderr.strip() or "it gives no reason").splitlines()
            raise UserError(f"npm cannot fetch {PACKAGE}: {reason}; or give --runtime {TARBALL}")
        contents = files(Path(scratch, TARBALL))
    cache.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with disk.atomic_write(cache / name) as beside:
            beside.write_bytes(content)
