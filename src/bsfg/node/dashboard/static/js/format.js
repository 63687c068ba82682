// Writes values the way people read them.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const MINUTE = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("sv", { dateStyle: "short" });

export const count = (number) => COUNT.format(number);
export const short = (number) => (Math.abs(number) < 10_000 ? COUNT.format(number) : SHORT.format(number));
export const clock = (unixMs) => CLOCK.format(unixMs);
export const minute = (unixMs) => MINUTE.format(unixMs);
export const day = (unixMs) => DAY.format(unixMs);

/** Write a time: today's by the clock alone, another day's with its date. */
export function moment(unixMs, now = Date.now()) {
  return day(unixMs) === day(now) ? clock(unixMs) : `${day(unixMs)} ${clock(unixMs)}`;
}

/** Write a span of time in the unit that suits it. */
export function span(seconds) {
  if (seconds < 0.001) return "0 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  const units = [[120, 1, "s"], [7_200, 60, "min"], [172_800, 3_600, "h"], [Infinity, 86_400, "d"]];
  const [, size, name] = units.find(([limit]) => seconds < limit);
  const value = seconds / size;
  const whole = Math.round(value);
  return `${name === "s" && value < 10 && Math.abs(value - whole) >= 0.05 ? value.toFixed(1) : whole} ${name}`;
}

/** Write hours of autonomy, in days when there are many. */
export function hours(value) {
  if (value < 1) return [String(Math.max(1, Math.round(value * 60))), "min"];
  if (value < 10) return [value.toFixed(1), "h"];
  if (value < 96) return [value.toFixed(0), "h"];
  const days = value / 24;
  return days < 3_650 ? [count(days), "days"] : ["10+", "years"];
}

/** Write a rate of facts. */
export function rate(perSecond) {
  if (perSecond === 0) return "0/s";
  if (perSecond < 10) return `${perSecond.toFixed(perSecond < 1 ? 2 : 1)}/s`;
  return `${short(perSecond)}/s`;
}

/** Write a number of bytes. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${value < 10 && step ? value.toFixed(1) : Math.round(value)} ${units[step]}`;
}

/** Write a share of something that is full at 100. */
export function percent(value) {
  if (value === 0) return "0 %";
  if (value < 0.01) return "< 0.01 %";
  return `${value < 1 ? value.toFixed(2) : value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}
