// Writes values the way people read them. The node's own `bsfg.wording` writes them alike, and a test compares the two.

const FEW = 10;

/** Write a number with so many digits behind the point, and those before it in groups of three. */
function fixed(value, digits = 0) {
  const [whole, rest] = value.toFixed(digits).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return rest ? `${grouped}.${rest}` : grouped;
}

export const count = (number) => fixed(number);

/** Write a number of things: 1 gap record, 2 gap records. */
export const counted = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

/** Keep numbers and their units in one line. */
export const whole = (text) => text.replace(/(\d) (?=[a-zA-Z%])/g, "$1\u00a0");

/** Write an offset: it names a place and has no groups, so that it can be pasted. */
export const offset = (number) => String(number);

/** Write a span of time in the unit that suits it. */
export function span(seconds) {
  const shown = (1000 * seconds).toFixed(0) / 1000;
  if (shown < 1) return `${fixed(1000 * seconds)} ms`;
  if (seconds < FEW) return `${Number(seconds.toFixed(2))} s`;
  const units = [[120, 1, "s"], [7_200, 60, "min"], [172_800, 3_600, "h"], [Infinity, 86_400, "d"]];
  const [, size, name] = units.find(([limit]) => seconds < limit);
  return `${fixed(seconds / size)} ${name}`;
}

/** Write hours of autonomy: in minutes when there are few, in days when there are many. */
export function hours(value) {
  if (value < 1) return `${Math.max(1, (60 * value).toFixed(0))} min`;
  if (value < 96) return `${fixed(value, value < FEW ? 1 : 0)} h`;
  const days = value / 24;
  return days < 3_650 ? `${fixed(days)} days` : "over 10 years";
}

/** Write how long a certificate still counts. */
export function lifetime(certificate, now) {
  if (certificate.expiry === "expired") return "expired";
  if (certificate.expiry === "not_yet_valid") return "not valid yet";
  if (certificate.days_left >= 4) return `${count(certificate.days_left)} days`;
  return hours(Math.max(0, certificate.not_after_unix_ms - now) / 3_600_000);
}

/** Write a rate of facts. */
export function rate(perSecond) {
  if (perSecond > 0 && perSecond < 0.05) return "< 0.1/s";
  return `${fixed(perSecond, perSecond > 0 && perSecond < FEW ? 1 : 0)}/s`;
}

/** Write a number of bytes. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${fixed(value, step ? 1 : 0)} ${units[step]}`;
}

/** Write a share of something that is full at 100. */
export const percent = (value) => (value > 0 && value < 0.05 ? "< 0.1 %" : `${fixed(value, 1)} %`);

/** Write a time of this browser's zone with its date and the zone: Z is UTC, as `bsfg status` has it. */
export function moment(unixMs) {
  if (!unixMs) return "–";
  return Number.isFinite(new Date(unixMs).getTime()) ? `${day(unixMs)} ${clock(unixMs)}${zone(unixMs)}` : `${unixMs} ms`;
}

export const day = (unixMs) => local(unixMs).slice(0, 10);
export const minute = (unixMs) => local(unixMs).slice(11, 16);
export const clock = (unixMs) => local(unixMs).slice(11, 19);

/** Name the zone of a time by how far it is from UTC. */
export function zone(unixMs) {
  const minutes = -new Date(unixMs).getTimezoneOffset();
  if (!minutes) return "Z";
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  return ` ${minutes < 0 ? "−" : "+"}${two(Math.abs(minutes) / 60)}:${two(Math.abs(minutes) % 60)}`;
}

function local(unixMs) {
  return new Date(unixMs - new Date(unixMs).getTimezoneOffset() * 60_000).toISOString();
}
