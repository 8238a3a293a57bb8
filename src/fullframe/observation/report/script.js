"use strict";
// Everything is there without this script; it adds the switch between light and dark, and a cross-hair to the charts.
const root = document.documentElement;
const isDark = () => (root.dataset.theme ||
  (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
for (const button of document.querySelectorAll(".theme")) {
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; });
}

const shown = (value) => value === null ? "not finite"
  : Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function follow(plot) {
  const data = JSON.parse(plot.dataset.chart), field = plot.querySelector(".field");
  const lines = data.lines.filter((line) => line.points.length);
  const cross = document.createElement("div"), tip = document.createElement("div");
  cross.className = "cross";
  tip.className = "tip";
  cross.hidden = tip.hidden = true;
  field.append(cross, tip);
  const [first, last] = data.x;
  const move = (event) => {
    if (!lines.length) return;
    const frame = field.getBoundingClientRect();
    const at = Math.min(Math.max((event.clientX - frame.left) / frame.width, 0), 1);
    const step = lines.map((line) => nearest(line.points, first + at * (last - first))[0])
      .reduce((a, b) => Math.abs(a - first - at * (last - first)) <= Math.abs(b - first - at * (last - first)) ? a : b);
    tip.replaceChildren(row("step " + step, "", ""));
    for (const line of [...lines].reverse()) {
      const point = nearest(line.points, step);
      tip.append(row(line.name, shown(point[1]), line.colour));
    }
    const place = (step - first) / (last - first);
    cross.style.left = 100 * place + "%";
    tip.style.left = place < .5 ? `calc(${100 * place}% + 10px)` : "auto";
    tip.style.right = place < .5 ? "auto" : `calc(${100 - 100 * place}% + 10px)`;
    cross.hidden = tip.hidden = false;
  };
  const leave = () => { cross.hidden = tip.hidden = true; };
  field.addEventListener("pointermove", move);
  field.addEventListener("pointerdown", move);
  field.addEventListener("pointerleave", leave);
}

function row(name, value, colour) {
  const line = document.createElement("div"), label = document.createElement("span"), number = document.createElement("b");
  if (colour) {
    const key = document.createElement("i");
    key.style.background = colour;
    label.append(key);
  }
  label.append(name);
  number.textContent = value;
  line.append(label, number);
  return line;
}

document.querySelectorAll(".plot").forEach(follow);
