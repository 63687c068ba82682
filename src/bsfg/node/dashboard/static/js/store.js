// What the page knows: the present state, and the last hour as series that all share one list of times.

const POINTS = 720;

export const known = { session: null, state: null, times: [], series: new Map() };

const name = (of) => JSON.stringify(of);

/** Take the whole history. */
export function takeHistory(history) {
  known.times = history.times;
  known.series = new Map(history.series.map(({ of, values }) => [name(of), { of, values }]));
}

/** Take one more point in time; the oldest leaves. */
export function takePoint(point) {
  known.times.push(point.time);
  const fresh = new Map(point.values.map(({ of, value }) => [name(of), { of, value }]));
  for (const [key, { of }] of fresh) {
    if (!known.series.has(key)) known.series.set(key, { of, values: new Array(known.times.length - 1).fill(null) });
  }
  for (const [key, { values }] of known.series) values.push(fresh.get(key)?.value ?? null);
  if (known.times.length > POINTS) {
    known.times.shift();
    for (const { values } of known.series.values()) values.shift();
  }
}

/** Give all series of a kind, such as "lag", each with what it is of. */
export function seriesOf(kind) {
  return [...known.series.values()].filter(({ of }) => of[0] === kind).map(({ of, values }) => ({ of: of.slice(1), values }));
}

/** Turn a counter into a rate per second; a counter that was not known, or went back, has none. */
export function rates(values) {
  return values.map((value, index) => {
    const before = index > 0 ? values[index - 1] : null;
    const seconds = index > 0 ? (known.times[index] - known.times[index - 1]) / 1000 : 0;
    return value === null || before === null || value < before || seconds <= 0 ? null : (value - before) / seconds;
  });
}

/** Add lists of values up; what is known nowhere stays unknown. */
export function summed(lists) {
  if (!lists.length) return [];
  return lists[0].map((_, index) => {
    const there = lists.map((list) => list[index]).filter((value) => value !== null);
    return there.length ? there.reduce((sum, value) => sum + value, 0) : null;
  });
}

/** Give the last value of a list that is known, among the last few. */
export function latest(values, within = 3) {
  for (const value of values.slice(-within).reverse()) if (value !== null) return value;
  return null;
}
