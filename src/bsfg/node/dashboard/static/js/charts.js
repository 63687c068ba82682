// The charts of the overview: throughput, lag, frontier and fill, for one stream or all.

import { Chart } from "./chart.js";
import { byId, h, renew } from "./dom.js";
import { count, day, percent, rate, span, zone } from "./format.js";
import { LAG_ALERT_SECONDS, LAG_WARNING_SECONDS } from "./judge.js";
import { known, rates, seriesOf, summed } from "./store.js";

const LAG_LIMITS = [
  { value: LAG_WARNING_SECONDS, level: "warning", says: "warning" },
  { value: LAG_ALERT_SECONDS, level: "alert", says: "alert" },
];
const FILL_LIMITS = [
  { value: 50, level: "warning", says: "warning" },
  { value: 80, level: "alert", says: "alert" },
];

let drawn = null;
let minutes = 15;

/** Put the charts up, and let the choices change them. */
export function setUpCharts() {
  const place = byId("charts");
  drawn = {
    throughput: new Chart(place, { title: "Throughput", unit: "facts per second, every five seconds", format: rate, least: 1 }),
    lag: new Chart(place, { title: "Replication lag", unit: "from the sender’s append to here, the worst of every five seconds", format: span, limits: LAG_LIMITS, log: true }),
    frontier: new Chart(place, { title: "Frontier", unit: "facts behind the end of the buffer", format: count, least: 10 }),
    fill: new Chart(place, { title: "Buffer fill", unit: "of the capacity", format: percent, least: 1, limits: FILL_LIMITS }),
  };
  document.querySelectorAll("[data-span]").forEach((button) => {
    button.addEventListener("click", () => choose(Number(button.dataset.span)));
  });
  byId("chart-stream").addEventListener("change", charts);
  new ResizeObserver(charts).observe(place);
  choose(minutes);
}

function choose(span) {
  minutes = span;
  document.querySelectorAll("[data-span]").forEach((button) => {
    button.setAttribute("aria-pressed", String(Number(button.dataset.span) === minutes));
  });
  charts();
}

/** Draw the charts anew. */
export function charts() {
  if (!drawn || !known.state || byId("charts").clientWidth === 0) return;
  const stream = chosenStream();
  const now = known.state.now_unix_ms;
  const draw = (chart, lines) => chart.draw(known.times, lines, minutes * 60_000, now);
  draw(drawn.throughput, throughput(stream));
  draw(drawn.lag, lag(stream));
  draw(drawn.frontier, frontier(stream));
  draw(drawn.fill, fill(stream));
  byId("charts-note").textContent = dated(Math.max(now - minutes * 60_000, known.times[0] ?? now), now);
}

/** Say of which days and of which zone the times of the axes are. */
function dated(from, now) {
  const days = day(from) === day(now) ? day(now) : `${day(from)} to ${day(now)}`;
  const name = zone(now) === "Z" ? "UTC" : `${zone(now).trim()}, ${Intl.DateTimeFormat().resolvedOptions().timeZone}`;
  return `${days}, ${name}`;
}

function chosenStream() {
  const select = byId("chart-stream");
  const streams = [...new Set(known.state.buffers.map((each) => each.stream))];
  renew(select, h("option", { value: "" }, "all"), streams.map((each) => h("option", { value: each }, each)));
  return select.value;
}

const fits = (stream, name) => !stream || stream === name;

function throughput(stream) {
  const ends = (buffer) => seriesOf("end").filter(({ of }) => of[1] === buffer && fits(stream, of[0]));
  const consumers = new Map(known.state.consumers.map((each) => [each.name, each]));
  const confirming = seriesOf("frontier").filter(({ of }) => {
    const consumer = consumers.get(of[0]);
    return consumer?.buffer === "store" && fits(stream, consumer.stream);
  });
  return [
    { label: "produced", values: summed(ends("store").map(({ values }) => rates(values))) },
    { label: "confirmed by others", values: summed(confirming.map(({ values }) => rates(values))) },
    { label: "received", values: summed(ends("forward").map(({ values }) => rates(values))) },
  ].filter((line) => line.values.length);
}

function lag(stream) {
  return seriesOf("lag").filter(({ of }) => fits(stream, of[1])).map(({ of, values }) => ({ label: `${of[0]} · ${of[1]}`, values }));
}

function frontier(stream) {
  const consumers = new Map(known.state.consumers.map((each) => [each.name, each]));
  return seriesOf("backlog").filter(({ of }) => consumers.has(of[0]) && fits(stream, consumers.get(of[0]).stream))
    .map(({ of, values }) => ({ label: of[0], values }));
}

function fill(stream) {
  return seriesOf("fill").filter(({ of }) => fits(stream, of[0])).map(({ of, values }) => ({ label: `${of[0]} · ${of[1]}`, values }));
}
