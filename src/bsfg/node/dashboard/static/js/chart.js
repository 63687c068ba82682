// A chart of a few series over time: axes, limits, a legend with the latest values, and a cross to read it by.

import { h, renew, s } from "./dom.js";
import { clock, minute, moment } from "./format.js";

const HEIGHT = 190;
const MARGIN = { top: 8, bottom: 22 };
const CHARACTER = 6.4;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 4", "12 4"];
const SERIES_MAX = 6;
const LEAST_MS = 60_000;

export class Chart {
  /** `format` writes a value, `least` is the least top of the axis, `limits` are [{value, level, says}], `log` a scale. */
  constructor(place, { title, unit, format, least = 1, limits = [], log = false }) {
    Object.assign(this, { format, least, limits, log, title });
    this.svg = s("svg", { class: "plot", role: "img", tabindex: "0" });
    this.legend = h("ul", { class: "legend" });
    this.tooltip = h("div", { class: "tooltip", hidden: true });
    place.append(h("div", { class: "chart" }, h("h3", {}, title, " ", h("small", {}, unit)), this.svg, this.legend, this.tooltip));
    this.shown = { times: [], lines: [] };
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    for (const away of ["pointerleave", "blur"]) this.svg.addEventListener(away, () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draw lines [{label, values}] over a span that ends now. */
  draw(times, lines, spanMs, now) {
    // A node that was just started fills the chart with what there is, and not with emptiness.
    const from = Math.max(now - spanMs, Math.min(times[0] ?? 0, now - LEAST_MS));
    const start = times.findIndex((time) => time >= from);
    const cut = start < 0 ? times.length : Math.max(0, start - 1);
    this.shown = {
      times: times.slice(cut),
      lines: lines.slice(0, SERIES_MAX).map((line) => ({ label: line.label, values: line.values.slice(cut) })),
      from,
      now,
    };
    this.render();
  }

  render() {
    const { times, lines, from, now } = this.shown;
    const width = Math.max(240, this.svg.clientWidth || 480);
    const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
    const scale = this.log ? logScale(values) : linearScale(values, this.least);
    // What stands beside the plot has its own room there, however long it is.
    const room = (texts) => Math.ceil(CHARACTER * Math.max(0, ...texts.map((text) => text.length)));
    const limits = this.limits.filter(({ value }) => scale.holds(value));
    this.left = 10 + room(scale.ticks.map(this.format));
    this.right = 8 + room(limits.map(({ says }) => says));
    const [left, right] = [this.left, width - this.right];
    const bottom = HEIGHT - MARGIN.bottom;
    this.x = (time) => left + ((time - from) / (now - from)) * (right - left);
    const y = (value) => bottom - scale.share(value) * (bottom - MARGIN.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.spoken());
    renew(this.svg,
      scale.ticks.map((tick) => [
        s("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
        s("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, this.format(tick)),
      ]),
      timeTicks(from, now, (right - left) / (9 * CHARACTER)).filter((time) => width - this.x(time) > 4.5 * CHARACTER).map((time) => s("text", { x: this.x(time), y: HEIGHT - 6, "text-anchor": "middle" }, time % 60_000 ? clock(time) : minute(time))),
      limits.map(({ value, level, says }) => [
        s("line", { class: `limit ${level}`, x1: left, x2: right, y1: y(value), y2: y(value) }),
        s("text", { class: level, x: right + 5, y: y(value) + 4 }, says),
      ]),
      // The point before the first one is drawn to as well; a picture of its own cuts what would cover the words.
      s("svg", { class: "area", x: left, width: right - left, height: HEIGHT, viewBox: `${left} 0 ${right - left} ${HEIGHT}` },
        lines.map((line, index) => s("path", { class: `curve s${index}`, "stroke-dasharray": DASHES[index] || null, d: this.curve(times, line.values, y) }))),
      this.cross(times, bottom));
    if (!values.length) this.svg.append(s("text", { x: (left + right) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
    this.drawLegend();
    this.drawTooltip();
  }

  /** Write a path that is broken where nothing was known for long. */
  curve(times, values, y) {
    let path = "";
    let before = null;
    values.forEach((value, index) => {
      if (value === null) return;
      const joined = before !== null && times[index] - before < 45_000;
      const [x, level] = [this.x(times[index]).toFixed(1), y(value).toFixed(1)];
      // A point without neighbours is a dot: a line of no length with round ends.
      path += joined ? `L${x} ${level}` : `M${x} ${level}h.01`;
      before = times[index];
    });
    return path;
  }

  cross(times, bottom) {
    if (this.at === null || this.at >= times.length) return null;
    const x = this.x(times[this.at]);
    return s("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: bottom });
  }

  last(values) {
    return values.slice(-3).findLast((value) => value !== null) ?? null;
  }

  written(value) {
    return value === null ? "–" : this.format(value);
  }

  drawLegend() {
    renew(this.legend, this.shown.lines.map((line, index) => h("li", {},
      s("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" },
        s("path", { class: `curve s${index}`, "stroke-dasharray": DASHES[index] || null, d: "M1 5H27" })),
      h("span", {}, line.label, " ", h("b", {}, this.written(this.last(line.values)))))));
  }

  drawTooltip() {
    const { times, lines } = this.shown;
    this.tooltip.hidden = this.at === null || this.at >= times.length;
    if (this.tooltip.hidden) return;
    renew(this.tooltip, h("p", {}, h("b", {}, moment(times[this.at]))),
      lines.map((line) => h("p", {}, line.label, ": ", h("b", {}, this.written(line.values[this.at])))));
    const share = this.x(times[this.at]) / Math.max(240, this.svg.clientWidth);
    this.tooltip.style.left = share < 0.5 ? `${(share * 100).toFixed(1)}%` : "auto";
    this.tooltip.style.right = share < 0.5 ? "auto" : `${((1 - share) * 100).toFixed(1)}%`;
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const { times, from, now } = this.shown;
    const time = from + ((event.clientX - box.left - this.left) / (box.width - this.left - this.right)) * (now - from);
    const near = times.reduce((best, each, index) => (Math.abs(each - time) < Math.abs(times[best] - time) ? index : best), 0);
    this.move(times.length && times[near] >= from ? near : null);
  }

  /** Arrow keys walk along the chart, for whoever has no mouse. */
  key(event) {
    const end = this.shown.times.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 };
    if (event.key === "Escape") this.move(null);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(end);
    else if (event.key in steps) this.move(Math.min(end, Math.max(0, (this.at ?? end + 1) + steps[event.key])));
    else return;
    event.preventDefault();
  }

  move(at) {
    if (at === this.at) return;
    this.at = at !== null && at < 0 ? null : at;
    this.render();
  }

  spoken() {
    const { times, lines } = this.shown;
    const at = this.at ?? times.length - 1;
    const when = this.at === null ? "now" : moment(times[at]);
    return `${this.title}, ${when}: ${lines.map((line) => `${line.label} ${this.written(line.values[at] ?? this.last(line.values))}`).join("; ") || "nothing yet"}`;
  }
}

/** A scale from 0 to a round number above everything. */
export function linearScale(values, least) {
  const top = Math.max(least, ...values);
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let index = 0; index * step < top * 0.999 + step; index += 1) ticks.push(index * step);
  const end = ticks[ticks.length - 1];
  return { ticks, share: (value) => Math.min(1, value / end), holds: (value) => value <= end };
}

/** A scale by powers of ten, wide enough for everything and at least two powers. */
export function logScale(values) {
  const there = values.filter((value) => value > 0);
  const low = Math.floor(Math.log10(Math.max(0.001, Math.min(0.01, ...there))));
  const high = Math.max(low + 3, Math.ceil(Math.log10(Math.max(...there, 10 ** low))));
  const ticks = [];
  const every = Math.ceil((high - low) / 5);
  for (let power = low; power <= high; power += every) ticks.push(10 ** power);
  const share = (value) => Math.min(1, Math.max(0, (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)));
  return { ticks, share, holds: (value) => value >= 10 ** low && value <= 10 ** high };
}

/** Give round times between two, no more than there is room for. */
function timeTicks(from, now, most) {
  const step = [15_000, 60_000, 180_000, 600_000, 900_000].find((each) => (now - from) / each <= Math.min(6, most)) ?? 1_800_000;
  const ticks = [];
  for (let time = Math.ceil(from / step) * step; time < now; time += step) ticks.push(time);
  // A label at the very edge would be cut.
  return ticks.filter((time) => (time - from) / (now - from) > 0.03);
}
