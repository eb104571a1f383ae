"""The report: what it holds, and what it does in a browser."""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from scheduler import plan as plan_step
from scheduler.cli.source import StepSource
from scheduler.decisions import Action
from scheduler.report.html import page_data, render_html, save_html
from solvers.solution import Offload, Prefetch
from tests.scheduler.toy import MB, make_plan, make_plan_with_copies

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

PROBE = """
<script>
addEventListener("load", () => {
  const canvas = document.getElementById("canvas"), found = { ready: document.body.dataset.ready, width: canvas.width };
  const middle = (D.start[D.peakAt] + endOf(D.peakAt)) / 2, box = canvas.getBoundingClientRect();
  const place = x => ({ clientX: box.left + x, clientY: box.top + 100, bubbles: true, cancelable: true });
  canvas.dispatchEvent(new MouseEvent("mousemove", place(xOf(middle))));
  const tip = document.getElementById("tip"); found.hover = tip.innerText; found.shown = tip.style.display;
  const rows = [...document.querySelectorAll("#modules tbody tr")];
  const visible = () => rows.filter(r => !r.hidden).map(r => r.dataset.path);
  found.before = visible();
  document.querySelector("button[aria-label='expand h']")?.click(); found.expanded = visible();
  document.querySelector("button[aria-label='expand (model)']")?.click(); found.collapsed = visible();
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, ...place(400) }));
  found.zoomed = view[1] - view[0];
  document.getElementById("all").click(); found.whole = view[1] - view[0];
  const pen = canvas.getContext("2d"), pixel = pen.getImageData(canvas.width / 2, canvas.height - 40, 1, 1).data;
  found.painted = pixel[3];
  found.loaded = performance.now(); found.moved = getComputedStyle(document.querySelector("th.moved")).display;
  found.at = at(D.link ? D.link.copies[0][0] : 0); show(found.at, 300); found.copying = tip.innerText;
  const x = D.link ? xOf((D.link.copies[0][0] + D.link.copies[0][1]) / 2) : 0;
  found.strip = [...pen.getImageData(x * (window.devicePixelRatio || 1), 9, 1, 1).data];
  const out = document.createElement("pre"); out.id = "found"; out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


@pytest.fixture
def plan():
    return make_plan({1, 2}, budget=205 * MB)


def test_data(plan):
    data = page_data(plan)
    assert sum(c["live"][data["peakAt"]] for c in data["categories"]) == plan.peak_bytes
    at_peak = [life for life in data["lives"] if life[4] <= data["peakAt"] <= life[5]]
    workspace = next((c["live"][data["peakAt"]] for c in data["categories"] if c["name"] == "workspace"), 0)
    assert sum(life[2] for life in at_peak) + plan.static_bytes + workspace == plan.peak_bytes
    rows = {m[0]: m[1:] for m in data["modules"]}
    depth, kept, recomputed, executions, added, _, offloaded = rows["(model)"]
    assert (depth, executions, added) == (0, 2, plan.added_time_ns)
    assert kept == sum(d.bytes for d in plan.decisions if d.action is Action.KEPT)
    assert recomputed == 20 * MB
    assert offloaded == 0
    assert data["link"] is None
    assert rows["h.1"][:3] == [1 + 1, rows["h.1"][1], 10 * MB]
    order = [m[0] for m in data["modules"]]
    assert order.index("h") < order.index("h.1") < order.index("h.1.linear")
    json.dumps(data)


def test_page_is_self_contained_and_safe(plan, tmp_path):
    import dataclasses

    hostile = dataclasses.replace(plan, graph=dataclasses.replace(plan.graph, name="</script><b>x"))
    page = render_html(hostile)
    assert page.count("</script>") == 1
    assert "</script><b>" not in page
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)
    save_html(plan, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == render_html(plan)


def opened(plan, page):
    """What the probe finds in a plan's page once Chromium has opened it."""
    page.write_text(render_html(plan).replace("</body>", PROBE + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1400", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=False, timeout=240)
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]))


in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")


@in_chromium
def test_in_a_browser(plan, tmp_path):
    found = opened(plan, tmp_path / "report.html")
    assert found["ready"] == "yes"
    data = page_data(plan)
    alive = sorted((life for life in data["lives"] if life[4] <= data["peakAt"] <= life[5]), key=lambda life: -life[2])
    assert found["shown"] == "block"
    assert "the peak" in found["hover"]
    assert sum(life[0] in found["hover"] for life in alive) >= min(8, len(alive))
    assert found["before"] == ["(model)", "wte", "h", "head"]
    assert found["expanded"] == ["(model)", "wte", "h", "h.0", "h.1", "h.2", "h.3", "head"]
    assert found["collapsed"] == ["(model)"]
    assert found["zoomed"] == pytest.approx(0.7 * plan.step_time_ns)
    assert found["whole"] == plan.step_time_ns
    assert found["painted"] == 255
    assert found["moved"] == "none"


@in_chromium
def test_copies_in_a_browser(tmp_path):
    plan = make_plan_with_copies()
    data = page_data(plan)
    copies = data["link"]["copies"]
    assert len(copies) == sum(isinstance(s, Offload | Prefetch) for s in plan.steps)
    assert {m[0]: m[7] for m in data["modules"]}["(model)"] == sum(c[4] for c in copies if c[2])
    found = opened(plan, tmp_path / "report.html")
    assert found["moved"] == "table-cell"
    assert f"on the link: {copies[0][3]}" in found["copying"]
    assert found["strip"][:3] == [0x3B, 0x4A, 0x6B]


@pytest.mark.slow
@in_chromium
def test_the_page_of_llama_3_8b(tmp_path):
    config = pathlib.Path(__file__).parents[2] / "examples" / "llama-3-8b.json"
    step = StepSource(hf=str(config), batch=1, seq=8192).build()
    plan = plan_step(step.model, 80, step.args, step.kwargs, device="h100-sxm")
    save_html(plan, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 5e6
    found = opened(plan, tmp_path / "probed.html")
    assert found["ready"] == "yes"
    assert "the peak" in found["hover"]
    data = page_data(plan)
    alive = sorted((life for life in data["lives"] if life[4] <= data["peakAt"] <= life[5]), key=lambda life: -life[2])
    assert all(life[0] in found["hover"] for life in alive[:8])
    assert found["loaded"] < 3000 * (1 + os.getloadavg()[0] / (os.cpu_count() or 1))
