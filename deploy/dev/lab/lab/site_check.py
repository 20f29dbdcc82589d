"""Looks at all pages of the documentation site in a headless browser: tables that do not fit, broken pictures.

``make docs`` runs it where a browser is installed: ``python -m lab.site_check out/site``.
"""

from __future__ import annotations

import contextlib
import functools
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH_PX = 1280
_LOOK = """<!doctype html><body><pre id=found></pre><iframe id=page width={width} height=900></iframe><script>
const frame = document.getElementById("page"), found = [];
const seen = page => new Promise(done => {{ frame.onload = done; frame.src = page; }});
(async () => {{
  for (const page of {pages}) {{
    await seen(page);
    const inside = frame.contentDocument;
    for (const table of inside.querySelectorAll("table")) {{
      let place = table.parentElement;
      while (getComputedStyle(place).display === "inline") place = place.parentElement;
      const more = table.getBoundingClientRect().right - place.getBoundingClientRect().right;
      if (more > 1) found.push([page, `a table is ${{Math.round(more)}} px wider than its column: ` +
        table.innerText.trim().slice(0, 60)]);
    }}
    for (const picture of inside.images) {{
      await picture.decode().catch(() => 0);
      if (!picture.naturalWidth) found.push([page, `a picture is broken: ${{picture.getAttribute("src")}}`]);
    }}
  }}
  document.getElementById("found").textContent = JSON.stringify({{pages: {pages}.length, found}});
}})();
</script>"""


def browser() -> str | None:
    """Return the path of a browser; ``None`` if none is installed."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address of a folder on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def faults(site: Path, program: str) -> list[str]:
    """Return what is wrong on the pages of a site, a line each."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if "_static" not in path.parts)
    with tempfile.TemporaryDirectory() as scratch:
        view = Path(scratch, "site")
        view.symlink_to(site.resolve())
        paths = json.dumps([f"site/{page}" for page in pages])
        Path(scratch, "look.html").write_text(_LOOK.format(width=WIDTH_PX, pages=paths), encoding="utf-8")
        with served(Path(scratch)) as address:
            done = subprocess.run(
                [
                    program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch}/profile",
                    "--virtual-time-budget=600000", "--dump-dom", f"{address}/look.html",
                ],
                capture_output=True, text=True, check=True, timeout=600,
            )  # fmt: skip
    report = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    found = json.loads(html.unescape(report[1])) if report and report[1] else None
    if found is None or found["pages"] != len(pages) or not pages:
        raise SystemExit(f"the browser has not seen all of {len(pages)} pages: {done.stderr[-2000:]}")
    return [f"{page.removeprefix('site/')}: {what}" for page, what in found["found"]]


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong, and return an exit code."""
    program = browser()
    if program is None:
        print("no browser is installed: tables and pictures are not looked at")
        return 0
    found = faults(Path(arguments[0]), program)
    print("\n".join(found) or "all tables fit, and no picture is broken")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
