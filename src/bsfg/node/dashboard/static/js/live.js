// Keeps the page live by server-sent events, and says so when it is not.

import { byId, renew } from "./dom.js";
import { moment } from "./format.js";
import { get, signInAgain } from "./api.js";
import { known, takeHistory, takePoint } from "./store.js";

const SILENCE_MS = 15_000;

let source = null;
let retry = 0;
let heard = 0;
let changed = () => {};

/** Begin; `onChange` is called whenever something new is known. */
export function live(onChange) {
  changed = onChange;
  open();
  // A browser has few connections to one node: a window that nobody sees gives its own back.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  setInterval(() => source && heard && Date.now() - heard > SILENCE_MS && lost(), 1_000);
}

function open() {
  if (source || document.hidden) return;
  source = new EventSource("/dashboard/api/events");
  source.addEventListener("hello", (event) => {
    const { history, state } = JSON.parse(event.data);
    takeHistory(history);
    take(state);
  });
  source.addEventListener("state", (event) => {
    const { state, point } = JSON.parse(event.data);
    if (point) takePoint(point);
    take(state);
  });
  source.addEventListener("ended", signInAgain);
  source.addEventListener("error", lost);
}

/** Stop listening, because nobody looks, or because he has signed out. */
export function close() {
  source?.close();
  source = null;
}

function take(state) {
  heard = Date.now();
  retry = 0;
  if (state.trouble) {
    show("off", "Trouble", `The node cannot describe itself: ${state.trouble.code}: ${state.trouble.message}`);
    return;
  }
  known.state = state;
  show("on", "Live", "");
  changed();
}

async function lost() {
  close();
  const since = heard ? `, as of ${moment(heard)}` : "";
  show("off", "Not connected", `The node does not answer. What you see is the last known state${since}.`);
  retry += 1;
  setTimeout(async () => {
    try {
      const session = await get("session");
      // A node that was upgraded has another page; a display on a wall is loaded again by nobody else.
      if (session.version !== known.session?.version) return location.reload();
      known.session = session;
    } catch (problem) {
      // Without an answer the node is away; with one we are on the way to the sign-in page.
      return problem.status === 401 ? undefined : lost();
    }
    open();
  }, Math.min(500 * 2 ** Math.min(retry, 5), 10_000));
}

function show(how, word, says) {
  const mark = byId("live");
  mark.className = `live ${how}`;
  if (mark.textContent !== word) mark.textContent = word;
  const banner = byId("banner");
  banner.hidden = !says;
  if (banner.textContent !== says) banner.textContent = says;
  document.body.classList.toggle("stale", how === "off");
  if (how === "off") {
    // Whether all is well, nobody knows now; the next state says it again.
    byId("health").className = "pill";
    renew(byId("health"), "Unknown");
  }
}
