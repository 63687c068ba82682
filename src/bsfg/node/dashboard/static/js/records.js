// Quarantined facts with what may be done about them, gap records, and certificates.

import { get } from "./api.js";
import { byId, foreign, h, renew, table } from "./dom.js";
import { count, lifetime, moment, offset } from "./format.js";
import { icon } from "./icons.js";
import { certificateLevel } from "./judge.js";
import { known } from "./store.js";

const sums = () => ["quarantined", "gaps"].map((name) => known.state.buffers.reduce((sum, each) => sum + each[name], 0));

let loaded = "";

/** Load the records again when their numbers have changed, or when it is asked for. */
export async function records(anew = false) {
  const mark = JSON.stringify(sums());
  if (!anew && mark === loaded) return;
  loaded = mark;
  try {
    const [aside, gaps] = await Promise.all([get("quarantine"), get("gaps")]);
    drawQuarantine(aside);
    drawGaps(gaps);
  } catch (problem) {
    loaded = "";
    renew(byId("quarantine"), h("p", { class: "empty" }, foreign(`The records could not be read: ${problem.message}`)));
  }
}

/** Show in the bar how many facts wait for a decision, and how many certificates end soon. */
export function counts() {
  const ending = known.state.certificates.filter((each) => certificateLevel(each) !== "ok").length;
  for (const [id, number, says] of [["records-count", sums()[0], "in quarantine"], ["certificates-count", ending, "end soon"]]) {
    const badge = byId(id);
    badge.hidden = !number;
    badge.textContent = count(number);
    badge.title = `${number} ${says}`;
  }
}

function more(total, shown) {
  return total > shown ? h("p", { class: "empty" }, `${count(total - shown)} older ones are in the download.`) : null;
}

function drawQuarantine({ total, rows }) {
  if (!total) return renew(byId("quarantine"), h("p", { class: "empty" }, "Nothing is in quarantine."));
  renew(byId("quarantine"), rows.map(quarantined), more(total, rows.length));
}

function quarantined(row) {
  const fact = row.facts[0];
  const there = row.existing_offset === null ? null : `, another stands at offset ${offset(row.existing_offset)}`;
  const key = { stream: row.stream, buffer: row.buffer, id: row.id };
  return h("div", { class: "record", data: { key: JSON.stringify(key), quarantined: `${row.stream}/${row.buffer}/${row.id}` } },
    h("div", {},
      h("h3", { class: "text" }, foreign(fact?.subject ?? ""), " ", foreign(fact?.predicate ?? "")),
      h("p", { class: "line" }, h("span", { class: "pill warning" }, icon("warning"), foreign(row.reason)), " ",
        foreign(row.from_zone), " / ", foreign(row.message_id), there),
      h("p", { class: "line" }, `${moment(row.at_unix_ms)}, `, foreign(row.stream), ` ${row.buffer} buffer`,
        row.detail ? [", ", foreign(row.detail)] : null)),
    known.session.may_act && h("div", { class: "buttons" },
      h("button", { type: "button", data: { act: "retry", ...key, name: row.message_id } }, "Retry…"),
      h("button", { type: "button", class: "danger", data: { act: "drop", ...key, name: row.message_id } }, "Drop…")),
    h("details", {}, h("summary", {}, "Content"),
      row.facts.map((each) => h("pre", {}, foreign(each.object), each.cut ? " … (the download has all of it)" : ""))));
}

function drawGaps({ total, rows }) {
  if (!total) return renew(byId("gaps"), h("p", { class: "empty" }, "There are no gap records: everything was delivered."));
  const head = ["When", "Buffer", "Offsets", "Facts", "Reason", "Detail"];
  renew(byId("gaps"), table(
    h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: ["Offsets", "Facts"].includes(name) && "number" }, name)))),
    h("tbody", {}, rows.map((gap) => h("tr", {},
      h("td", { class: "time" }, moment(gap.at_unix_ms)),
      h("td", {}, foreign(gap.stream), `, ${gap.buffer}`, gap.origin_zone ? h("span", { class: "sub" }, "offsets of ", foreign(gap.origin_zone)) : null),
      h("td", { class: "number" }, gap.first === gap.last ? offset(gap.first) : `${offset(gap.first)}–${offset(gap.last)}`),
      h("td", { class: "number" }, count(gap.count)),
      h("td", {}, h("span", { class: "pill" }, foreign(gap.reason.replaceAll("_", " ")))),
      h("td", {}, h("span", { class: "text" }, foreign(gap.detail || "–"))))))), more(total, rows.length));
}

/** Draw the table of certificates, the first to end first. */
export function certificates() {
  const found = [...known.state.certificates].sort((a, b) => a.days_left - b.days_left);
  if (!found.length) {
    renew(byId("certificates"), h("p", { class: "empty" }, "This node serves without TLS: for trials on one machine."));
    return;
  }
  const uses = { node: "this node", authority: "authority", caller: "caller" };
  renew(byId("certificates"), table(
    h("thead", {}, h("tr", {}, ["Name", "Use", "Valid until", "Left", "File"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, found.map((each) => {
      const level = certificateLevel(each);
      return h("tr", { data: { certificate: each.name } },
        h("td", {}, h("strong", {}, foreign(each.name))),
        h("td", {}, uses[each.use]),
        h("td", { class: "time" }, moment(each.not_after_unix_ms)),
        h("td", {}, h("span", { class: `pill ${level}` }, icon(level), lifetime(each, known.state.now_unix_ms))),
        h("td", {}, h("code", {}, foreign(each.file))));
    }))));
}
