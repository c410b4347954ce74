// Browsers load modules and files for a page only from a server. This script is no module, so it runs all the same.
if (location.protocol === "file:") {
  document.getElementById("status").textContent =
    "A browser cannot run this page from a file. In its folder run python3 -m http.server --bind 127.0.0.1 and open http://127.0.0.1:8000";
}
