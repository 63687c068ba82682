// Asks the node: every answer that is not a good one becomes an error with the node's own words.

import { known } from "./store.js";

const SIGN_IN = "/dashboard/sign-in?ended";
const RELOADED = "bsfg-reloaded";

export class Refused extends Error {
  constructor(problem, status) {
    super(problem.detail ?? `the node answered with ${status}`);
    this.hint = problem.hint ?? "";
    this.code = problem.code ?? "";
    this.status = status;
  }
}

/** Ask for a document. */
export async function get(path) {
  return answered(await fetch(`/dashboard/api/${path}`, { credentials: "same-origin", cache: "no-store" }));
}

/** Have the node do something, as our own page. */
export async function post(path, body = {}) {
  const headers = { "content-type": "application/json", "x-bsfg-page-key": known.session?.page_key ?? "" };
  return answered(await fetch(`/dashboard/${path}`, { method: "POST", credentials: "same-origin", headers, body: JSON.stringify(body) }));
}

async function answered(response) {
  if (response.ok) return response.json();
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401) signInAgain();
  throw new Refused(problem, response.status);
}

/** Leave for the sign-in page. Whoever has a certificate gets a new session by loading the page, tried once a minute. */
export function signInAgain() {
  const last = Number(sessionStorage.getItem(RELOADED) ?? 0);
  if (known.session?.by !== "token" && Date.now() - last > 60_000) {
    sessionStorage.setItem(RELOADED, String(Date.now()));
    location.reload();
  } else {
    location.assign(SIGN_IN);
  }
}
