"""The style sheet of a page, and the script that shows the values of a plot at the pointer. Pure."""

from __future__ import annotations

LIGHT = ("#0072b2", "#d55e00", "#00845f", "#b0467f", "#3da5d9", "#b98000", "#4b3fa8", "#555555")
DARK = ("#58b4f0", "#ff8f4f", "#35cf9f", "#f29fcb", "#a5dcff", "#ffc64d", "#b1a8ff", "#d0d0d0")
"""Eight colours each for a light and a dark background, distinguishable with any colour vision."""
DASHES = ("", "", "", "", "45 25", "45 25", "45 25", "45 25")
"""The dashes of each colour: of two similar colours, one is dashed."""


def colour_rules(selector: str = "") -> str:
    """Return the CSS rules that give lines and legend marks their colours, for both backgrounds."""
    return (
        _rules(LIGHT, selector)
        + "@media (prefers-color-scheme:dark){"
        + _rules(DARK, selector)
        + "}"
        + "".join(
            f".line.c{number}{{stroke-dasharray:{dashes}}}" for number, dashes in enumerate(DASHES) if dashes
        )
    )


def _rules(values: tuple[str, ...], selector: str) -> str:
    return "".join(f"{selector}.c{number}{{color:{value}}}" for number, value in enumerate(values))


PLOT_STYLE = (
    "text{font:115px system-ui,sans-serif;fill:var(--quiet)}"
    ".grid{stroke:var(--grid);stroke-width:8;fill:none}"
    ".line{stroke:currentColor;stroke-width:17;fill:none;stroke-linejoin:round}"
)
"""The style of a drawing; it uses the CSS variables `--quiet` and `--grid`."""

GROUNDS = (
    ":root{color-scheme:light dark;--ground:#fff;--card:#f7f8fa;--text:#1a1d21;--quiet:#59616b;"
    "--grid:#dfe3e8;--good:#00704f;--bad:#b3261e}"
    "@media (prefers-color-scheme:dark){:root{--ground:#14171a;--card:#1c2024;--text:#e8eaed;"
    "--quiet:#a3abb5;"
    "--grid:#343a41;--good:#4fd6a6;--bad:#ff8a80}}"
)

STYLE = (
    GROUNDS
    + """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1500px;padding:16px clamp(12px,3vw,40px) 48px;background:var(--ground);
color:var(--text);font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:8px 0 0;line-height:1.2}h2{font-size:19px;margin:36px 0 8px}
p{margin:6px 0;max-width:75ch}.quiet{color:var(--quiet)}
code{font:13px/1.4 ui-monospace,monospace;background:var(--card);padding:2px 6px;border-radius:4px;
overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 12px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--ground);font-weight:400}
thead th{font-weight:600;vertical-align:bottom;white-space:normal;min-width:88px}
tbody th[scope=rowgroup]{font-weight:600;padding-top:14px}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:700}
dt{font-weight:600;margin-top:8px}dd{margin:0 0 0 16px;color:var(--quiet)}
.legend{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:2px 18px;padding:8px 0;margin:0;
background:var(--ground);list-style:none;font-size:14px}
.mark{display:inline-block;width:22px;height:0;border-top:3px solid currentColor;margin-right:6px;
vertical-align:middle}.mark.c4,.mark.c5,.mark.c6,.mark.c7{border-top-style:dashed}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:16px}
figure{position:relative;margin:0;max-width:640px;padding:10px 10px 4px;background:var(--card)}
figure{border-radius:8px}
figcaption{font-weight:600;font-size:14px}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
.cursor{stroke:var(--quiet);stroke-width:8}
.readout{position:absolute;z-index:3;pointer-events:none;background:var(--ground);
border:1px solid var(--grid);border-radius:6px;padding:4px 8px;
font-size:12px;line-height:1.45;font-variant-numeric:tabular-nums;
white-space:nowrap}
"""
    + PLOT_STYLE
)

SCRIPT = """
(() => {
  const parseAxis = (text) => {
    const [kind, lowest, highest, start, end, divisor, ...unit] = text.split(" ");
    const [low, high, from, to, factor] = [lowest, highest, start, end, divisor].map(Number);
    return {valueAt: (position) => {
      const share = (position - from) / (to - from);
      return kind === "log" ? low * (high / low) ** share : low + (high - low) * share;
    }, kind, from, to, factor, unit: unit.join(" ")};
  };
  const formatNumber = (value) => {
    const decimals = value ? Math.max(2 - Math.floor(Math.log10(Math.abs(value))), 0) : 0;
    return value.toLocaleString("en", {maximumFractionDigits: Math.min(decimals, 6)});
  };
  const formatValue = (axis, position) => {
    let value = axis.valueAt(position) / axis.factor, unit = axis.unit;
    if (axis.kind === "log" && unit === "s" && value < 1) { value *= 1000; unit = "ms"; }
    return `${formatNumber(value)} ${unit}`;
  };
  const readPoints = (path) => {
    const points = [];
    let x = 0, y = 0;
    for (const [, command, a, b] of path.getAttribute("d").matchAll(/([Ml])(-?\\d+) (-?\\d+)/g)) {
      x = command === "M" ? +a : x + +a; y = command === "M" ? +b : y + +b;
      points.push([x, y]);
    }
    return points;
  };
  for (const svg of document.querySelectorAll("svg[data-x]")) {
    const xAxis = parseAxis(svg.dataset.x), yAxis = parseAxis(svg.dataset.y), figure = svg.closest("figure");
    let lines, cursor, readout;
    const hide = () => { cursor?.remove(); readout?.remove(); cursor = readout = undefined; };
    const show = (event) => {
      const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
      const x = Math.min(Math.max((event.clientX - box.left) / box.width * width, xAxis.from), xAxis.to);
      lines ??= [...svg.querySelectorAll(".line")].map((path) => ({path, points: readPoints(path)}));
      if (!readout) {
        cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
        cursor.setAttribute("class", "cursor");
        svg.append(cursor);
        readout = document.createElement("div");
        readout.className = "readout";
        figure.append(readout);
      }
      cursor.setAttribute("d", `M${x} ${yAxis.to}V${yAxis.from}`);
      readout.replaceChildren(formatValue(xAxis, x));
      for (const {path, points} of lines) {
        if (!points.length) continue;
        const nearest = points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
        const row = document.createElement("div"), mark = document.createElement("span");
        mark.className = "mark " + path.classList[1];
        row.append(mark, `${path.dataset.name}: ${formatValue(yAxis, nearest[1])}`);
        readout.append(row);
      }
      const pointer = event.clientX - figure.getBoundingClientRect().left;
      const leftMax = figure.clientWidth - readout.offsetWidth;
      const left = pointer + 14 < leftMax ? pointer + 14 : pointer - readout.offsetWidth - 14;
      readout.style.left = Math.min(Math.max(left, 0), Math.max(leftMax, 0)) + "px";
      readout.style.top = "36px";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
})();
"""
