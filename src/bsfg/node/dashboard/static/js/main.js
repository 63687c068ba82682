// Puts the page together: who looks, which view, and what is drawn when something changes.

import { get, post } from "./api.js";
import { buffers } from "./buffers.js";
import { charts, setUpCharts } from "./charts.js";
import { setUpDialogs, toast } from "./dialogs.js";
import { byId } from "./dom.js";
import { moment, span } from "./format.js";
import { facts, setUpFacts } from "./facts.js";
import { findings, gates } from "./gates.js";
import { happened, setUpHistory } from "./history.js";
import { links, setUpLinks } from "./links.js";
import { close, live } from "./live.js";
import { map } from "./map.js";
import { certificates, counts, records } from "./records.js";
import { pipelines } from "./pipelines.js";
import { known } from "./store.js";
import { theme } from "./theme.js";
import { tiles } from "./tiles.js";
import { setUpTrail, trail } from "./trail.js";

const VIEWS = {
  overview: () => [tiles, map, gates, pipelines, charts].forEach((draw) => draw()),
  links,
  buffers,
  facts,
  records: () => records(),
  history: () => happened(),
  trail: () => trail(),
  certificates,
};

const view = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "overview");

function show() {
  document.querySelectorAll("[data-of]").forEach((section) => (section.hidden = section.dataset.of !== view()));
  document.querySelectorAll("[data-view]").forEach((link) => {
    if (link.dataset.view === view()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  draw();
}

function draw() {
  if (!known.state) return;
  findings();
  counts();
  VIEWS[view()]();
  const { version, started_unix_ms: started, now_unix_ms: now } = known.state;
  byId("foot").textContent = `bsfg ${version}, up ${span((now - started) / 1000)}, node time ${moment(now)}${nodes()}${configured()}`;
}

/** Which configuration counts, and what of the file does not yet. */
function configured() {
  const found = known.state.configuration;
  if (!found) return "";
  const waiting = found.waiting_for_restart.length ? `; waits for a restart: ${found.waiting_for_restart.join(", ")}` : "";
  return `; configuration taken up ${moment(found.loaded_unix_ms)}${waiting}${found.problem ? "; the file has a mistake" : ""}`;
}

/** Of a zone with several nodes, which one is active and which stand by. */
function nodes() {
  const names = (active) => known.state.nodes.filter((each) => each.active === active).map((each) => each.name);
  return known.state.nodes?.length ? `; active ${names(true).join(", ")}, stands by ${names(false).join(", ") || "nobody"}` : "";
}

function who({ identity, by, may_act: mayAct, ends_unix_ms: ends }) {
  byId("who-name").textContent = identity.replace(/^token:/, "");
  byId("who-role").textContent = mayAct ? "operator" : "viewer";
  const how = { token: "Signed in with a token", certificate: "Known by certificate", plaintext: "Without TLS, on this machine" };
  byId("who-how").textContent = `${how[by]} until ${moment(ends)}.`;
  byId("sign-out").hidden = by !== "token";
  byId("reload").hidden = !mayAct;
}

theme();
setUpCharts();
setUpDialogs();
addEventListener("hashchange", () => {
  show();
  // A view is called like the part that it is drawn into, and a browser would scroll to that.
  scrollTo(0, 0);
  // Once more when the part is shown, which is when a browser does it.
  requestAnimationFrame(() => requestAnimationFrame(() => scrollTo(0, 0)));
});
byId("sign-out").addEventListener("click", async () => {
  close();
  const { sign_in: next } = await post("sign-out");
  location.assign(next);
});
byId("reload").addEventListener("click", async () => {
  try {
    const { changed, waiting_for_restart: waiting } = await post("api/act/reload");
    const rest = waiting.length ? ` These count after a restart: ${waiting.join(", ")}.` : "";
    toast(`${changed.length ? `Taken up: ${changed.join(", ")}.` : "The file counts; nothing of it has changed since it was last taken up."}${rest}`);
  } catch (problem) {
    toast(`Nothing was taken up: ${problem.message}`);
  }
});
document.addEventListener("click", (event) => {
  if (!event.target.closest("#who")) byId("who").open = false;
});
// A session that may act ends when nobody is there: a hand on mouse or keyboard says that somebody is.
let told = Date.now();
["pointerdown", "keydown"].forEach((kind) =>
  addEventListener(kind, () => {
    if (Date.now() - told < 60_000) return;
    told = Date.now();
    get("session?awake").catch(() => {});
  }),
);
known.session = await get("session");
who(known.session);
setUpTrail();
setUpFacts();
setUpLinks();
setUpHistory();
live(draw);
show();
