// Facts to look at: the newest of a buffer that fit, and those that come, as far as the reader's own rights go.

import { byId, foreign, h, renew, table } from "./dom.js";
import { count, moment, offset } from "./format.js";
import { known } from "./store.js";

const SHOWN_MAX = 500;
const [PAUSE_MS, PAUSE_MAX_MS] = [100, 1000];
const FIELDS = ["subject", "predicate", "from_zone"];

let source = null;
let rows = [];
let says = "";
let drawing = 0;
let pause = PAUSE_MS;
let begun = false;
let chosen = false;

/** Fill the choices, and look when something is chosen. */
export function setUpFacts() {
  const { reads } = known.session;
  const names = reads.map(([stream, buffer]) => h("option", { value: `${stream}/${buffer}` }, `${stream}, ${buffer}`));
  renew(byId("facts-of"), names);
  byId("facts-form").hidden = !reads.length;
  byId("facts-none").hidden = Boolean(reads.length);
  byId("facts-form").addEventListener("submit", (event) => {
    event.preventDefault();
    open();
  });
  ["facts-of", "facts-follow"].forEach((id) => byId(id).addEventListener("change", open));
  addEventListener("hashchange", () => location.hash !== "#facts" && close());
  // A browser has few connections to one node: a window that nobody sees gives its own back.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : location.hash === "#facts" && open()));
}

/** Begin to look when the view is opened. */
export function facts() {
  if (begun || !known.session.reads.length) return;
  begun = true;
  chosen ||= choose();
  open();
}

/** Begin with a buffer that has something to show: whoever relays facts produces none. */
function choose() {
  const holds = ([stream, buffer]) => known.state.buffers.some((each) => each.stream === stream && each.buffer === buffer && each.end > each.start);
  const [stream, buffer] = known.session.reads.find(holds) ?? known.session.reads[0];
  byId("facts-of").value = `${stream}/${buffer}`;
  return true;
}

function close() {
  source?.close();
  source = null;
  begun = false;
  rows = [];
}

function open() {
  close();
  begun = true;
  const [, stream, buffer] = byId("facts-of").value.match(/^(.*)\/(.*)$/) ?? [];
  if (!stream) return;
  const query = new URLSearchParams({ buffer, last: "100", follow: String(byId("facts-follow").checked) });
  FIELDS.map((name) => [name, byId(`facts-${name}`).value.trim()]).forEach(([name, text]) => text && query.set(name, text));
  says = "Looking…";
  source = new EventSource(`/dashboard/api/facts/${encodeURIComponent(stream)}?${query}`);
  const on = (name, take) => source.addEventListener(name, (event) => { take(JSON.parse(event.data)); soon(); });
  source.addEventListener("open", () => { says = byId("facts-follow").checked ? "Live" : ""; soon(); });
  on("fact", (fact) => rows.unshift(factRow(fact)));
  on("gap", ({ first, last, reason, detail }) => rows.unshift(rangeRow(first, last, `not here: ${reason} ${detail ?? ""}`)));
  on("skipped", ({ first, last, reason }) => rows.unshift(rangeRow(first, last,
    reason === "behind" ? "left out: this page did not keep up" : "not searched; older facts may fit, too")));
  on("restored", ({ next_offset: next }) => rows.unshift(rangeRow(next, next, "the history is another one from here on")));
  on("refused", ({ message }) => stop(message));
  on("ended", () => stop("The session has ended."));
  on("end", () => stop(`The newest ${count(rows.length)} that fit.`));
  source.addEventListener("error", (event) => {
    if (event.target.readyState === EventSource.CLOSED) stop("The node refused to show these facts, or has no place for one more who looks on.");
    else says = "Not connected; trying again.";
    soon();
  });
  soon();
}

function stop(text) {
  source?.close();
  source = null;
  says = text;
}

/** Draw at most a few times a second, however many facts come, and more seldom where it takes long. */
function soon() {
  drawing ||= setTimeout(() => {
    const from = performance.now();
    drawing = 0;
    draw();
    // Most of the work is the browser's, before it shows the next frame.
    requestAnimationFrame(() => setTimeout(() => { pause = Math.min(PAUSE_MAX_MS, Math.max(PAUSE_MS, 3 * (performance.now() - from))); }));
  }, pause);
}

function draw() {
  rows.length = Math.min(rows.length, SHOWN_MAX);
  renew(byId("facts-says"), foreign(says));
  const isAsked = FIELDS.some((name) => byId(`facts-${name}`).value.trim());
  if (!rows.length) return renew(byId("facts"), h("p", { class: "empty" }, isAsked ? "No fact fits." : "No fact is in this buffer."));
  // The rows are made once: only what is new enters the page.
  const place = byId("facts").querySelector("tbody");
  if (place) bring(place);
  else renew(byId("facts"), table(h("thead", {}, h("tr", {}, ["Offset", "Stored", "Zone", "Subject", "Predicate", "Object"].map((name) =>
    h("th", { scope: "col", class: name === "Offset" && "number" }, name)))), h("tbody", {}, rows)));
}

/** Add what is new and take out what is too many; rows that stay are not touched. */
function bring(place) {
  const added = rows.indexOf(place.firstElementChild);
  if (added < 0) return place.replaceChildren(...rows);
  place.prepend(...rows.slice(0, added));
  while (place.childElementCount > rows.length) place.lastElementChild.remove();
}

function factRow(fact) {
  const cells = [
    h("td", { class: "number" }, offset(fact.offset)),
    h("td", { class: "time" }, moment(fact.appended_at_unix_ms)),
    h("td", { class: "from" }, foreign(fact.from_zone)),
    h("td", { class: "subject" }, h("strong", {}, foreign(fact.subject)), h("span", { class: "sub" }, foreign(fact.message_id))),
    h("td", {}, foreign(fact.predicate)),
    h("td", { class: "object" }, object(fact)),
  ];
  return labelled(h("tr", { data: { fact: fact.offset } }, cells));
}

function rangeRow(first, last, text) {
  const range = first === last ? offset(first) : `${offset(first)}–${offset(last)}`;
  return h("tr", { class: "range" }, h("td", { class: "number", data: { label: "Offset" } }, range), h("td", { colspan: 5, data: { label: "" } }, foreign(text)));
}

function labelled(row) {
  ["Offset", "Stored", "Zone", "Subject", "Predicate", "Object"].forEach((name, at) => { row.cells[at].dataset.label = name; });
  return row;
}

function object(fact) {
  const artifact = fact.artifact ? h("span", { class: "sub" }, "artifact ", foreign(fact.artifact)) : null;
  const cut = fact.cut ? h("span", { class: "sub" }, "cut here; the rest is too long for a page") : null;
  const text = /[+/]json$/.test(fact.media_type) ? pretty(fact.object) : fact.object;
  if (text.length <= 60 && !text.includes("\n")) return [h("code", {}, foreign(text)), artifact];
  return [h("details", {}, h("summary", {}, h("code", {}, foreign(fact.object.slice(0, 200)))), h("pre", {}, foreign(text)), cut), artifact];
}

/** Break JSON into lines without reading its numbers: they are shown as they were written. */
export function pretty(text) {
  let [out, depth, quoted] = ["", 0, false];
  const line = () => `\n${"  ".repeat(depth)}`;
  for (let at = 0; at < text.length; at += 1) {
    const char = text[at];
    if (quoted) {
      out += char === "\\" ? char + (text[(at += 1)] ?? "") : char;
      quoted = char !== '"';
    } else if (char === '"') {
      out += char;
      quoted = true;
    } else if ("{[".includes(char)) {
      const empty = "}]".includes(text[at + 1]);
      depth += empty ? 0 : 1;
      out += empty ? char + text[(at += 1)] : char + line();
    } else if ("}]".includes(char)) {
      depth = Math.max(0, depth - 1);
      out += line() + char;
    } else out += char === "," ? char + line() : char === ":" ? ": " : char;
  }
  return out;
}
