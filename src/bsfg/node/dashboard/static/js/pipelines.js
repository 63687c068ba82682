// The pipelines as a table: what each does, how often it ran and failed, its last error, and when it runs next.

import { byId, foreign, h, renew } from "./dom.js";
import { count, moment, span } from "./format.js";
import { icon } from "./icons.js";
import { pipelineLevel } from "./judge.js";
import { known } from "./store.js";

const HEAD = ["Pipeline", "State", "Doing", "Runs", "Failed", "Facts", "Last good", "Next run"];
const NUMBERS = ["Runs", "Failed", "Facts"];

/** Draw the table of pipelines, if the zone has any. */
export function pipelines() {
  const rows = known.state.pipelines ?? [];
  byId("pipelines-card").hidden = !rows.length;
  renew(byId("pipelines"), h("table", { class: "pipelines" },
    h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col", class: NUMBERS.includes(name) && "number" }, name)))),
    h("tbody", {}, rows.map(row))));
}

function row(each) {
  const level = pipelineLevel(each.state);
  const number = (name, label) => h("td", { class: "number", data: { label } }, count(each[name]));
  return h("tr", { data: { key: each.pipeline, pipeline: each.pipeline } },
    h("td", { class: "what" }, h("strong", {}, foreign(each.pipeline)), h("span", { class: "sub" }, each.kind)),
    h("td", {}, h("span", { class: `${level}-text` }, icon(level), " ", each.state)),
    h("td", { class: "why" }, h("span", { class: "text" }, ...doing(each))),
    number("runs", "runs"),
    number("failures", "failed"),
    number("facts", "facts"),
    h("td", { data: { label: "last good" } }, each.last_good_unix_ms ? moment(each.last_good_unix_ms) : "never"),
    h("td", { data: { label: "next run" } }, each.next_unix_ms ? moment(each.next_unix_ms) : "\u2013"));
}

/** What it does, or why it does not; of one that nobody runs, who told of it last and when. */
function doing(each) {
  if (each.state === "off") return ["not enabled"];
  if (each.run === null) return ["nobody has run it since the node started"];
  const error = each.last_error ? h("span", { class: "sub" }, `${moment(each.last_error_unix_ms)}: `, foreign(each.last_error)) : "";
  if (each.state === "dead") {
    const ago = span(Math.max(0, known.state.now_unix_ms - each.told_unix_ms) / 1000);
    return [foreign(each.run), ` last told of it ${ago} ago`, error];
  }
  return [foreign(each.finding || each.progress), error];
}
