// Hover values: the point of each curve that is nearest to the pointer, read back out of the drawing.
"use strict";
(() => {
  const tip = document.getElementById("tip");
  const number = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e7) ? v.toExponential(3) : String(+v.toPrecision(5)));
  const read = (chart) => {
    if (chart.read) return chart.read;
    const plot = chart.querySelector(".plot"), d = chart.dataset;
    const width = plot.width.baseVal.value, height = plot.height.baseVal.value, log = d.log === "1";
    const [x0, x1, y0, y1] = [d.x0, d.x1, d.y0, d.y1].map(Number);
    const [low, high] = log ? [Math.log10(y0), Math.log10(y1)] : [y0, y1];
    const value = (y) => { const v = high - (y / height) * (high - low); return log ? 10 ** v : v; };
    const curves = [...plot.querySelectorAll("polyline")].map((line) => ({
      label: line.dataset.label,
      points: line.getAttribute("points").split(" ").map((p) => p.split(",").map(Number)),
    }));
    return (chart.read = { plot, width, value, curves, step: (x) => x0 + (x / width) * (x1 - x0) });
  };
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] < x) low = middle; else high = middle; }
    return x - points[low][0] < points[high][0] - x ? points[low] : points[high];
  };
  const show = (event) => {
    const chart = event.target.closest && event.target.closest("svg.chart");
    if (!chart) { hide(); return; }
    const { plot, width, value, curves, step } = read(chart);
    const box = chart.getBoundingClientRect(), left = plot.x.baseVal.value;
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width - left;
    if (x < 0 || x > width) { hide(); return; }
    const found = curves.map((c) => [c.label, nearest(c.points, x)]);
    const at = found.reduce((a, b) => (Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a))[1][0];
    const lines = found.map(([label, p]) => `${label ? label + ": " : ""}${number(value(p[1]))}${chart.dataset.unit ? " " + chart.dataset.unit : ""}`);
    tip.textContent = `step ${Math.round(step(at)).toLocaleString("en")}\n${lines.slice(0, 16).join("\n")}`;
    tip.style.display = "block";
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - w - 6)}px`;
    tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - h - 6))}px`;
    document.querySelectorAll(".cursor").forEach((c) => (c.style.visibility = "hidden"));
    const cursor = chart.querySelector(":scope > .cursor");
    cursor.setAttribute("x1", left + at); cursor.setAttribute("x2", left + at); cursor.style.visibility = "visible";
  };
  const hide = () => { tip.style.display = "none"; document.querySelectorAll(".cursor").forEach((c) => (c.style.visibility = "hidden")); };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", hide, { passive: true });
})();
