// Which values are as they should be; the limits are those of the alarm list.

export const LAG_WARNING_SECONDS = 0.1;
export const LAG_ALERT_SECONDS = 1;
const BACKLOG_WARNING = 100;
const BACKLOG_ALERT = 10_000;
const AUTONOMY_HOURS = 24;

export const backlogLevel = (facts) => (facts > BACKLOG_ALERT ? "alert" : facts > BACKLOG_WARNING ? "warning" : "ok");

export const fillLevel = (fill) => (fill === "healthy" ? "ok" : fill);

/** The end of autonomy is news only while somebody who should pull is away. */
export function autonomyLevel(hours, links) {
  const away = links.some((link) => link.side === "sender" && (link.mode === "autonomous" || link.mode === "held"));
  return away && hours < AUTONOMY_HOURS ? "warning" : "ok";
}

/** How soon is too soon is configured (`expiry_warning`), so the node says it. */
export const certificateLevel = (certificate) => (certificate.expiry === "ok" ? "ok" : "alert");

export const WORDS = { ok: "Healthy", warning: "Warning", alert: "Alert" };

const PIPELINES_OK = ["starting", "running", "waiting", "off"];

export const pipelineLevel = (state) => (PIPELINES_OK.includes(state) ? "ok" : state === "dead" ? "alert" : "warning");
