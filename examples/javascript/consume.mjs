// Takes facts: node consume.mjs CONSUMER OUTPUT.jsonl [IDLE_SECONDS]
//
// What it did is on disk before it is confirmed, under the key of the fact: what comes twice is done once.

import { createReadStream, existsSync } from "node:fs";
import { open } from "node:fs/promises";
import { createInterface } from "node:readline";
import { Consumer, download } from "./bsfg.mjs";
import { nodeFromEnvironment } from "./produce.mjs";

const [name, output, idleSeconds = "5"] = process.argv.slice(2);
const node = nodeFromEnvironment();
const done = new Set();
const file = await open(output, "a+");
if (existsSync(output)) {
  let whole = 0;
  for await (const line of createInterface({ input: createReadStream(output) })) {
    try {
      done.add(JSON.parse(line).key);
      whole += Buffer.byteLength(line) + 1;
    } catch {
      // Torn by a kill, and so never confirmed: it comes again.
    }
  }
  await file.truncate(Math.min(whole, (await file.stat()).size));
}
const consumer = new Consumer(node, name, {
  onProblem: (error) => console.error(`not now: ${error.code} ${error.message}`),
});
for await (const item of consumer.items({ idleMs: Number(idleSeconds) * 1000 })) {
  if (item.kind === "gap") {
    console.error(`missing: ${item.first} to ${item.last}, ${item.reason}`);
  } else if (!done.has(item.key)) {
    if (item.artifact) await download(node, item.artifact.digest, `${output}.${item.artifact.digest.slice(7, 19)}`);
    const { key, offset, subject, predicate, objectJson } = item;
    await file.appendFile(`${JSON.stringify({ key, offset, subject, predicate, objectJson })}\n`);
    await file.sync();
    done.add(key);
    console.log(`took ${offset}`);
  }
  consumer.confirm(item);
}
await consumer.close();
await file.close();
node.close();
