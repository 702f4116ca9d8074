// graphile-worker: jobs fetched by 500 into a local queue, and finished in batches without delay.
// The same command line as the Python adapters have (base.py); NODE_PATH leads to its modules.
"use strict";
const fs = require("node:fs");
const path = require("node:path");
const { setTimeout: sleep } = require("node:timers/promises");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const WARM = 20;
const EVERY = 50;
const CHUNK = 5000;
const WORKER = {
  concurrentJobs: 24,
  maxPoolSize: 25,
  localQueue: { size: 500 },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};
const [url, command, count] = process.argv.slice(2);
const jobs = Number(count);
const quiet = new Logger(() => () => {});

// Milliseconds since 1970 when performance.now() was 0. Date.now() knows only whole ones, so the
// moment at which it changes is awaited.
function findOrigin() {
  const before = Date.now();
  let now = before;
  while (now === before) now = Date.now();
  return now - performance.now();
}
const origin = findOrigin();
const seconds = () => (origin + performance.now()) / 1000;

// The slot of benchmarks/tally.py: when the first job began, when the last one did, how many.
const tally = { first: 0, last: 0, count: 0, file: null };

function flush() {
  const slot = Buffer.alloc(24);
  slot.writeDoubleLE(tally.first, 0);
  slot.writeDoubleLE(tally.last, 8);
  slot.writeBigInt64LE(BigInt(tally.count), 16);
  fs.writeSync(tally.file, slot, 0, 24, 0);
}

async function nothing() {
  tally.last = seconds();
  if (!tally.count++) {
    tally.first = tally.last;
    tally.file = fs.openSync(path.join(process.env.BENCH_TALLY, String(process.pid)), "w");
    setInterval(flush, 5);
  }
}

async function arrive({ value }) {
  fs.appendFileSync(process.env.BENCH_ARRIVALS, `${seconds() - value}\n`);
}

async function fill(utils) {
  for (let at = 0; at < jobs; at += CHUNK) {
    const many = Math.min(CHUNK, jobs - at);
    await utils.addJobs(
      Array.from({ length: many }, (_, i) => ({ identifier: "nothing", payload: { value: at + i } })),
    );
  }
}

async function oneByOne(utils, times = jobs) {
  for (let value = 0; value < times; value++) await utils.addJob("nothing", { value });
}

async function paced(utils) {
  let due = performance.now();
  for (let i = 0; i < jobs; i++) {
    due += EVERY;
    await sleep(Math.max(0, due - performance.now()));
    await utils.addJob("arrive", { value: seconds() });
  }
}

async function produce(send) {
  const utils = await makeWorkerUtils({ connectionString: url, logger: quiet });
  if (send === oneByOne) await oneByOne(utils, WARM);
  const began = performance.now();
  await send(utils);
  console.log((jobs / (performance.now() - began)) * 1000);
  await utils.release();
}

async function make() {
  const utils = await makeWorkerUtils({ connectionString: url, logger: quiet });
  await utils.migrate();
  await utils.release();
}

async function work() {
  const runner = await run({
    preset: { worker: { connectionString: url, ...WORKER } },
    taskList: { nothing, arrive },
    logger: quiet,
    parsedCronItems: [],
  });
  await runner.promise;
}

const commands = {
  make,
  work,
  fill: () => produce(fill),
  one: () => produce(oneByOne),
  paced: () => produce(paced),
};
commands[command]().catch((error) => {
  console.error(error);
  process.exit(1);
});
