// Asks an operator for a reason before anything is done, does it, and says how it went.

import { post } from "./api.js";
import { byId } from "./dom.js";
import { records } from "./records.js";

const ACTS = {
  hold: {
    title: ({ link }) => `Hold ${link}`,
    text: ({ side, zone }) => side === "receiver"
      ? `This node stops pulling from ${zone}. Nothing is lost: facts wait in the store buffer there until the gate is released.`
      : `${zone} is refused when it pulls from here. Nothing is lost: facts wait in the store buffer here until the gate is released.`,
    confirm: "Hold",
    danger: true,
    done: ({ link }) => `${link} is held.`,
  },
  release: {
    title: ({ link }) => `Release ${link}`,
    text: () => "The gate opens: the next fetch that succeeds starts to catch up. Read why it was held before you release it.",
    confirm: "Release",
    done: ({ link }) => `${link} is released.`,
  },
  retry: {
    title: ({ name }) => `Retry ${name}`,
    text: () => "The fact is put again. What is taken now, or is there already, leaves quarantine; a conflict conflicts again and stays.",
    confirm: "Retry",
    done: ({ name }, result) => result.settled ? `${name} has left quarantine.` : `${name} ${result.result === "conflict" ? "conflicts again" : "is known, but what is stored cannot be read,"} and stays in quarantine.`,
  },
  drop: {
    title: ({ name }) => `Drop ${name}`,
    text: () => "The fact is given up for good. Who did it and why stays on record. Download it first if in doubt.",
    confirm: "Drop",
    danger: true,
    done: ({ name }) => `${name} is dropped.`,
  },
};

let asked = null;

/** Let every button that carries an act open the dialog. */
export function setUpDialogs() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (button) ask({ ...button.dataset });
  });
  byId("dialog-cancel").addEventListener("click", () => byId("dialog").close());
  byId("dialog-form").addEventListener("submit", (event) => {
    event.preventDefault();
    carryOut();
  });
}

function ask(about) {
  const act = ACTS[about.act];
  asked = about;
  byId("dialog-title").textContent = act.title(about);
  byId("dialog-text").textContent = act.text(about);
  byId("dialog-reason").value = "";
  byId("dialog-duration").value = "";
  byId("dialog-duration-row").hidden = about.act !== "hold";
  byId("dialog-confirm").textContent = act.confirm;
  byId("dialog-confirm").classList.toggle("danger", Boolean(act.danger));
  problem("");
  byId("dialog").showModal();
  byId("dialog-reason").focus();
}

async function carryOut() {
  const reason = byId("dialog-reason").value.trim();
  if (!reason) {
    problem("Say why, for those who read the record later.");
    byId("dialog-reason").focus();
    return;
  }
  const button = byId("dialog-confirm");
  button.disabled = true;
  try {
    const result = await post(`api/act/${asked.act}`, body(reason));
    byId("dialog").close();
    toast(ACTS[asked.act].done(asked, result));
    if (asked.act === "retry" || asked.act === "drop") records(true);
  } catch (error) {
    problem(error.hint ? `${error.message}. ${error.hint}` : error.message);
  } finally {
    button.disabled = false;
  }
}

function body(reason) {
  const { act, link, side, stream, buffer, id } = asked;
  if (act === "release") return { link, side, reason };
  if (act !== "hold") return { stream, buffer, id: Number(id), reason };
  const seconds = byId("dialog-duration").value;
  return { link, side, reason, for_seconds: seconds ? Number(seconds) : null };
}

function problem(says) {
  byId("dialog-problem").hidden = !says;
  byId("dialog-problem").textContent = says;
}

let fading = 0;

export function toast(says) {
  byId("toast").textContent = says;
  clearTimeout(fading);
  fading = setTimeout(() => (byId("toast").textContent = ""), 6_000);
}
