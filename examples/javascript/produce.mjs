// Says facts: node produce.mjs BATCH COUNT [FILE], e.g. node produce.mjs B1042 100 report.pdf
//
// It may be killed and started again at any moment, as may the node: every fact arrives once.

import { readFileSync } from "node:fs";
import { Node, Producer, upload } from "./bsfg.mjs";

export function nodeFromEnvironment() {
  const { BSFG_HTTP = "localhost:9080", BSFG_CA, BSFG_CERT, BSFG_KEY, BSFG_SERVER_NAME } = process.env;
  const [host, port] = BSFG_HTTP.split(":");
  const read = (path) => (path ? readFileSync(path) : undefined);
  return new Node({
    host, port: Number(port), ca: read(BSFG_CA), cert: read(BSFG_CERT), key: read(BSFG_KEY), serverName: BSFG_SERVER_NAME,
  });
}

if (import.meta.url === `file://${process.argv[1]}`) {
  const [batch, count, file] = process.argv.slice(2);
  const node = nodeFromEnvironment();
  const producer = await new Producer(node, {
    stream: process.env.BSFG_STREAM ?? "operational",
    toZone: process.env.BSFG_TO_ZONE ?? "enterprise",
    outbox: process.env.BSFG_OUTBOX ?? "outbox",
    onProblem: (error) => console.error(`not now: ${error.code ?? ""} ${error.message}`),
    onRefused: (error) => console.error(`refused: ${error.code} ${error.message}`),
  }).start();
  for (let step = 0; step < Number(count); step += 1) {
    // The id is the event: whoever runs this again says the same, and nothing happens twice.
    await producer.send(
      { subject: `batch:${batch}`, predicate: "step_completed", objectJson: `{"step": ${step}, "celsius": ${step}.50}` },
      { messageId: `${batch}/${step}` },
    );
    console.log(`said ${step}`);
  }
  if (file !== undefined) {
    const { digest } = await upload(node, "reports", `${batch}/report`, file);
    await producer.send(
      { subject: `batch:${batch}`, predicate: "reported", object: {}, artifactDigest: digest },
      { messageId: `${batch}/report` },
    );
  }
  await producer.drain();
  await producer.close();
  node.close();
}
