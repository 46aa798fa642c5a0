// Holds what the site's search answers against what it should: `node docs/site/search.js SITE`.
// It runs the worker that a browser runs, on the index that was built, and fails where another page comes first.
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

// What somebody types, and the page that answers it.
const ANSWERS = {
  "TrainState": "api/manager/",
  "MemoryStorageWriter": "api/calls/",
  "corrupt": "operating/",
  "credentials": "operating/",
  "faq": "operating/",
  "fsdp": "fsdp2/",
  "install": "tutorial/",
  "kubernetes": "operating/",
  "lightning": "lightning/",
  "max_to_keep": "migration/",
  "no space left": "operating/",
  "oom": "operating/",
  "orbax": "migration/",
  "out of memory": "operating/",
  "resume": "recovery/",
  "s3": "storage-backends/",
  "should_save": "migration/",
  "slow": "operating/",
  "slurm": "operating/",
  "troubleshooting": "operating/",
};

/** Start the worker; what is returned sends it a message, and resolves to its answer. */
function started(site) {
  const directory = path.join(site, "assets/javascripts/workers");
  const name = fs.readdirSync(directory).find((one) => /^search\..*\.js$/.test(one));
  let receive, answer;
  const browser = {
    console,
    addEventListener: (_, listener) => (receive = listener),
    postMessage: (message) => answer(message.data),
  };
  browser.self = browser;
  vm.runInNewContext(fs.readFileSync(path.join(directory, name), "utf8"), browser);
  return (type, data) =>
    new Promise((resolve) => {
      answer = resolve;
      receive({ data: { type, data } });
    });
}

async function main(site) {
  const send = started(site);
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await send(0, { ...index, options: { suggest: false } });
  for (const [question, expected] of Object.entries(ANSWERS)) {
    const { items } = await send(2, question);
    const pages = items.map((sections) => sections[0].location.split("#")[0]);
    if (pages[0] !== expected) {
      console.error(`search "${question}": ${pages[0] ?? "nothing"} comes first, not ${expected}`);
      process.exitCode = 1;
    }
  }
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
