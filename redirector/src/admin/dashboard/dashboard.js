// What the agent knows, asked of its own admin port again and again. All that is shown comes from outside (names of pods, services,
// certificates, errors), so it only ever becomes text: nothing here makes HTML of a string.
"use strict";

const PAGE_ROWS = 20;
const KEPT_FLOWS = 1000;
const LONGEST_PAUSE_MS = 60000;
// An agent that is slow to answer is asked less: at most this part of the time goes by with its answers.
const BUSY_SHARE = 20;

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const inOrder = new Intl.Collator("en", { numeric: true });

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

function span(milliseconds) {
  const seconds = milliseconds / 1000;
  if (seconds < 1) return `${Math.round(milliseconds)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const ending = (at) => (at === null ? "–" : at <= Date.now() ? "is over" : `in ${span(at - Date.now())}`);
const named = (place) => (place.name ? `${place.namespace}/${place.name}` : "");

// A cell is a text, or a text with a kind of state, or a text with a quieter one below it.
function cell(value, kind, isHead) {
  const made = element(isHead ? "th" : "td", null, kind);
  if (isHead) made.scope = "row";
  if (value && value.state) made.append(element("span", value.text, `state ${value.state}`));
  else if (value && value.below !== undefined) made.append(value.text, element("span", value.below, "quiet"));
  else made.textContent = value ?? "";
  return made;
}

const textOf = (value) => (value && value.text !== undefined ? `${value.text} ${value.below ?? ""}` : `${value ?? ""}`);

// A table in its section, a page of rows at a time: however many there are, the document stays small, and nothing that has the focus is
// ever made anew.
class Table {
  constructor(id, columns, empty) {
    const section = byId(id);
    const title = section.querySelector("h2").textContent;
    section.append(byId("table").content.cloneNode(true));
    this.columns = columns;
    this.empty = empty;
    this.rows = [];
    this.total = null;
    this.first = 0;
    this.filter = section.querySelector("input");
    this.filter.setAttribute("aria-label", `Filter ${title.toLowerCase()}`);
    this.count = section.querySelector(".count");
    this.body = section.querySelector("tbody");
    this.before = section.querySelector(".before");
    this.after = section.querySelector(".after");
    section.querySelector(".pager").setAttribute("aria-label", `Pages of ${title.toLowerCase()}`);
    section.querySelector(".scroll").setAttribute("aria-label", title);
    section.querySelector("caption").textContent = title;
    for (const column of columns) {
      const head = element("th", column.title, column.kind);
      head.scope = "col";
      section.querySelector("thead tr").append(head);
    }
    this.filter.addEventListener("input", () => this.turn(0));
    this.before.addEventListener("click", () => this.turn(this.first - PAGE_ROWS));
    this.after.addEventListener("click", () => this.turn(this.first + PAGE_ROWS));
    this.draw();
  }

  turn(first) {
    this.first = Math.max(0, first);
    this.draw();
  }

  // `total` may be more than there are rows: the agent bounds its answers.
  show(rows, total) {
    this.rows = rows;
    this.total = total ?? rows.length;
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const has = (row) => this.columns.some((column) => textOf(column.of(row)).toLowerCase().includes(wanted));
    const rows = wanted ? this.rows.filter(has) : this.rows;
    if (this.first >= rows.length) this.first = Math.max(0, Math.floor((rows.length - 1) / PAGE_ROWS) * PAGE_ROWS);
    const shown = rows.slice(this.first, this.first + PAGE_ROWS);
    this.body.replaceChildren(...shown.map((row) => this.row(row)));
    if (!shown.length) this.body.append(this.nothing(wanted));
    const last = this.first + shown.length;
    const range = shown.length ? `${number.format(this.first + 1)}–${number.format(last)} of ${number.format(rows.length)}` : "none";
    const cut = this.total > this.rows.length ? ` (the agent has ${number.format(this.total)})` : "";
    const told = this.total === null ? "" : `${range}${cut}`;
    // Only what changes is told to who listens.
    if (this.count.textContent !== told) this.count.textContent = told;
    this.before.disabled = this.first === 0;
    this.after.disabled = last >= rows.length;
  }

  row(row) {
    const made = element("tr");
    this.columns.forEach((column, at) => made.append(cell(column.of(row), column.kind, at === 0)));
    return made;
  }

  nothing(wanted) {
    const made = element("tr");
    const text = this.total === null ? "Not asked yet" : wanted && this.rows.length ? "Nothing has this in it" : this.empty;
    const only = element("td", text, "quiet");
    only.colSpan = this.columns.length;
    made.append(only);
    return made;
  }
}

const POD_STATES = {
  captured: { text: "captured", state: "good" },
  impaired: { text: "impaired", state: "bad" },
  starting: { text: "starting", state: "wait" },
  stopping: { text: "stopping", state: "wait" },
  notCaptured: { text: "not captured", state: "bad" },
};
const stateOf = (pod) => (pod.state === "captured" && pod.impaired ? "impaired" : pod.state);
const podState = (pod) => POD_STATES[stateOf(pod)] ?? { text: pod.state, state: "wait" };

const pods = new Table("pods", [
  { title: "Pod", of: (pod) => named(pod) },
  { title: "State", kind: "word", of: podState },
  { title: "Addresses", of: (pod) => (pod.addresses ?? []).join(", ") },
  { title: "Service account", of: (pod) => pod.serviceAccount },
  { title: "Plaintext", kind: "word", of: (pod) => (pod.strict ? "refused" : "allowed") },
  { title: "Note", of: (pod) => pod.error },
], "No pod is enrolled on this node");

const SECURITY = {
  mutual_tls: { text: "mutual TLS", state: "good" },
  same_node: { text: "same node", state: "good" },
  plaintext: { text: "plaintext", state: "wait" },
};
const security = (flow) => SECURITY[flow.security] ?? flow.security;
const end = (addr, party, service) => ({ text: service ?? party.workload ?? addr ?? "", below: service || party.workload ? addr ?? "" : "" });
const flowColumns = [
  { title: "Pod", of: (flow) => named(flow.pod) },
  { title: "Direction", kind: "word", of: (flow) => flow.direction },
  { title: "From", of: (flow) => end(flow.src.addr, flow.src) },
  { title: "To", of: (flow) => end(flow.dst.addr, flow.dst, flow.dst.service) },
  { title: "Between pods", kind: "word", of: security },
  { title: "Sent", kind: "number", of: (flow) => bytes(flow.bytesSent) },
  { title: "Received", kind: "number", of: (flow) => bytes(flow.bytesReceived) },
];
const connections = new Table("connections", [
  ...flowColumns,
  { title: "Open for", kind: "number", of: (flow) => span(flow.durationMs) },
], "No connection is open");
const flows = new Table("flows", [
  ...flowColumns,
  { title: "Took", kind: "number", of: (flow) => span(flow.durationMs) },
  { title: "Outcome", kind: "word", of: (flow) => (flow.state === "failed" ? { text: `failed ${flow.responseFlags}`, state: "bad" } : { text: "complete", state: "good" }) },
  { title: "Why", of: (flow) => flow.error ?? flow.policy },
], "No connection has ended yet");

const certificateEnd = (identity) => {
  const at = identity.certChain.length ? Date.parse(identity.certChain[0].expirationTime) : NaN;
  return Number.isNaN(at) ? null : at;
};
const identities = new Table("identities", [
  { title: "Identity", of: (identity) => identity.identity },
  { title: "State", of: (identity) => ({ text: identity.state, state: identity.state === "Available" ? "good" : identity.state === "Initializing" ? "wait" : "bad" }) },
  { title: "Certificate ends", of: (identity) => ({ text: ending(certificateEnd(identity)), below: identity.certChain[0]?.expirationTime ?? "" }) },
  { title: "Serial number", of: (identity) => identity.certChain[0]?.serialNumber },
  { title: "Last renewal", of: (identity) => identity.renewalError ?? "" },
], "No identity is in use");

const packets = new Table("packets", [
  { title: "Program", of: (count) => count.program },
  { title: "Verdict", of: (count) => count.verdict },
  { title: "Packets", kind: "number", of: (count) => number.format(count.packets) },
  { title: "Pods", kind: "number", of: (count) => number.format(count.pods) },
], "No program has seen a packet, or the backend counts none");

function showPods(view) {
  const health = byId("health");
  const told = view.ready ? "ready" : "not ready";
  if (health.textContent !== told) health.textContent = told;
  health.className = `badge ${view.ready ? "good" : "bad"}`;
  byId("about").textContent = `backend ${view.backend}`;
  const reasons = byId("reasons");
  reasons.hidden = !view.pending.length;
  reasons.replaceChildren(...view.pending.map((reason) => element("li", `waits for ${reason}`)));
  const missed = view.missed.map((pod) => ({ ...pod, state: "notCaptured" }));
  const all = [...missed, ...view.pods];
  const rank = (pod) => ["notCaptured", "impaired", "starting", "stopping"].indexOf(stateOf(pod)) >>> 0;
  all.sort((one, other) => rank(one) - rank(other) || inOrder.compare(named(one), named(other)));
  const captured = all.filter((pod) => stateOf(pod) === "captured").length;
  byId("tile-pods").textContent = `${number.format(captured)} of ${number.format(all.length)}`;
  pods.show(all);
}

function showConnections(view) {
  byId("tile-connections").textContent = number.format(view.total);
  connections.show(view.connections, view.total);
}

let ended = [];
let next = null;
function showFlows(view) {
  // A number that goes back is another agent's.
  if (next !== null && view.next < next) ended = [];
  next = view.next;
  ended = [...view.flows.reverse(), ...ended].slice(0, KEPT_FLOWS);
  const failed = ended.filter((flow) => flow.state === "failed").length;
  byId("tile-failed").textContent = `${number.format(failed)} of ${number.format(ended.length)}`;
  flows.show(ended);
}

function showCertificates(view) {
  const all = view.certificates;
  const available = all.filter((identity) => identity.state === "Available");
  const ends = available.map(certificateEnd).filter((at) => at !== null);
  byId("tile-identities").textContent = `${number.format(available.length)} of ${number.format(all.length)}`;
  byId("tile-expiry").textContent = ends.length ? ending(ends.reduce((one, other) => Math.min(one, other))) : "–";
  const bad = (identity) => (identity.state === "Available" ? 1 : 0);
  identities.show(all.sort((one, other) => bad(one) - bad(other) || (certificateEnd(one) ?? 0) - (certificateEnd(other) ?? 0)));
}

// A quote within a value is escaped, so none of a pod's names can pass for a label.
const VERDICT = /^redirector_verdicts_total\{(?=(?:.*,)?program="([^"]*)")(?=(?:.*,)?verdict="([^"]*)").*\} (\d+)$/gm;
function showMetrics(text) {
  const sums = new Map();
  for (const [, program, verdict, count] of text.matchAll(VERDICT)) {
    const key = `${program} ${verdict}`;
    const sum = sums.get(key) ?? { program, verdict, packets: 0, pods: 0 };
    sum.packets += Number(count);
    sum.pods += count === "0" ? 0 : 1;
    sums.set(key, sum);
  }
  packets.show([...sums.values()].filter((sum) => sum.packets).sort((one, other) => other.packets - one.packets));
}

const failing = new Map();
function tell() {
  const trouble = byId("trouble");
  const told = [...failing].map(([path, why]) => `${path}: ${why}`).join("; ");
  const text = told && `The agent does not answer; what is shown is old. ${told}`;
  if (trouble.textContent !== text) trouble.textContent = text;
  trouble.hidden = !text;
  if (text) {
    byId("health").textContent = "not answering";
    byId("health").className = "badge bad";
  }
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const seen = () => new Promise((done) => {
  const look = () => {
    if (document.hidden) return;
    document.removeEventListener("visibilitychange", look);
    done();
  };
  document.addEventListener("visibilitychange", look);
  look();
});

// Asks for one thing for ever, one question at a time, and not while nobody looks.
async function follow(path, read, show, every) {
  let fails = 0;
  for (;;) {
    await seen();
    const began = performance.now();
    const asked = path();
    const name = asked.split("?")[0];
    try {
      const answer = await fetch(asked, { cache: "no-store", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show(await read(answer));
      fails = 0;
      failing.delete(name);
    } catch (error) {
      fails += 1;
      failing.set(name, error.message);
    }
    tell();
    const took = performance.now() - began;
    await pause(Math.min(LONGEST_PAUSE_MS, Math.max(every, took * BUSY_SHARE) * 2 ** Math.min(fails, 6)));
  }
}

const json = (answer) => answer.json();
const text = (answer) => answer.text();
follow(() => "pods", json, showPods, 3000);
follow(() => "connections?limit=10000", json, showConnections, 3000);
follow(() => `flows?limit=${KEPT_FLOWS}${next === null ? "" : `&after=${next}`}`, json, showFlows, 3000);
follow(() => "certificates", json, showCertificates, 15000);
follow(() => "metrics", text, showMetrics, 15000);
