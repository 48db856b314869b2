// The page of one channel: figures, who is on it, its latency, what `penstock why` says, its last messages and their fields.
import { WORDS, bytes, count, element, micros, rate, reconcile, text, worst } from "/format.js";
import { Plot } from "/plots.js";
import { Tail } from "/tail.js";

const one = id => document.getElementById(id);
const MOST_SAMPLES = 600, MOST_FIELDS = 200;  // that are kept; the plot draws some of them
const now = { address: "", asked: 0, times: [], series: {} };
const fields = new Plot(one("field-plot"), () => showFields());
const tail = new Tail({ start: one("channel-tail-start"), note: one("channel-tail-note"), list: one("channel-tail-list"), address: () => now.address, onRecord: record => addFields(record) });

// A broker's queue is where messages wait: those who read it are its peers.
const isQueue = handle => handle.room === "broker" && handle.kind === "queue", reading = handle => isQueue(handle) ? handle.peers : 1;

export function showChannel(address, handles, state) {
  if (address !== now.address) { leaveChannel(); now.address = address; text(one("channel-name"), address); one("channel-tail-list").replaceChildren(); text(one("channel-tail-note"), ""); }
  const readable = /^(shm:|tcp:|journal:|broker:\/\/|nats:)/.test(address);
  one("channel-tail-start").hidden = !readable; one("channel-tail-none").hidden = readable;
  text(one("channel-tail-none"), address.startsWith("broker:") ? "A reader would take messages from the queue; penstock queue peek shows what waits." : "Only the program itself can read here.");
  const sources = handles.filter(handle => ["publisher", "source", "client"].includes(handle.kind)), readers = handles.filter(handle => !sources.includes(handle) && !["tail", "bus", "channel", "journal", "writer", "broker"].includes(handle.kind));
  const sum = (list, of) => list.reduce((total, handle) => total + of(handle), 0);
  // Where nobody publishes from here: what the busiest reader got, as its ledger has it.
  const counted = sources.length ? sources : [...readers].sort((a, b) => b.messages - a.messages).slice(0, 1), verb = sources.length || !readers.length ? "published" : "delivered";
  const messages = sum(counted, handle => handle.messages), volume = sum(counted, handle => handle.bytes), slowest = Math.max(0, ...readers.map(handle => handle.latency_p99_us ?? 0));
  const tiles = [["rate", rate(sum(counted, handle => handle.rate_hz)), `${verb} a second`], ["size", messages ? bytes(volume / messages) : "–", "a message on average"],
    ["sent", count(messages), `messages ${verb}`], ["lost", count(sum(handles, handle => handle.lost)), "lost since opened"], ["p99", slowest ? micros(slowest) : "–", "latency, 99 of 100"], ["health", WORDS[worst(handles.map(handle => handle.health))], `${sources.length} publish, ${sum(readers, reading)} read`]];
  if (readers.some(isQueue)) tiles.push(["queued", count(sum(readers.filter(isQueue), handle => handle.depth)), "messages in the queue"]);
  reconcile(one("channel-tiles"), tiles, tile => tile[0], () => { const made = element("div", "tile"); made.append(element("b"), element("span")); return made; }, (made, [, figure, note]) => { text(made.firstChild, figure); text(made.lastChild, note); });
  reconcile(one("channel-table").tBodies[0], handles.slice(0, 300), handle => handle.key, handle => {
    const row = element("tr"); row.dataset.key = handle.key;
    row.append(...["", "health", "n", "", "n", "n", "n", "n", "why"].map(kind => element("td", kind)));
    row.cells[1].append(element("span", "pill"));
    return row;
  }, (row, handle) => {
    const [kind, health, ...rest] = row.cells, pill = health.firstChild;
    text(kind, handle.kind); pill.className = `pill ${handle.health}`; text(pill, WORDS[handle.health]);
    [rate(handle.rate_hz), handle.program, String(handle.pid), count(handle.messages), count(handle.lost), handle.latency_p99_us === null ? "–" : micros(handle.latency_p99_us), handle.health === "idle" ? "" : handle.reasons.join("; ")].forEach((shown, at) => text(rest[at], shown));
  });
  if (state.time_s - now.asked > 5) { now.asked = state.time_s; ask(address); }
}

export function leaveChannel() {
  tail.end();
  Object.assign(now, { address: "", asked: 0, times: [], series: {} });
  one("channel-why-note").hidden = false; one("channel-fields").hidden = true; one("field-filter").value = ""; one("channel-why").replaceChildren(); one("channel-latency").replaceChildren(); one("channel-why").known = one("channel-latency").known = undefined;
}

async function ask(address) {
  const answer = await fetch(`/api/channel?address=${encodeURIComponent(address)}`).catch(() => null);
  if (!answer || now.address !== address) return;
  const said = await answer.json();
  one("channel-why-note").hidden = true;
  reconcile(one("channel-why"), said.why ?? [{ text: said.error, remedy: "", grave: true }], finding => finding.text, () => { const line = element("li"); line.append(element("span", "pill"), element("span"), element("code")); return line; }, (line, finding) => {
    const [mark, what, remedy] = line.children;
    mark.className = `pill ${finding.grave ? "stuck" : "idle"}`; text(mark, finding.grave ? "reason" : "seen"); text(what, finding.text); text(remedy, finding.remedy);
  });
  const most = Math.max(1, ...(said.latency ?? []).map(bucket => bucket.count)), total = (said.latency ?? []).reduce((sum, bucket) => sum + bucket.count, 0);
  text(one("channel-latency-note"), total ? `${count(total)} measured` : "nothing measured: a reader measures the first message after each wait, and one in 1,024 of a stream");
  reconcile(one("channel-latency"), said.latency ?? [], bucket => bucket.below_us, () => { const made = element("div", "bucket"), fill = element("i"), track = element("div", "track"); track.append(fill); made.append(element("span"), track, element("b")); return made; }, (made, bucket) => {
    text(made.children[0], bucket.below_us === null ? "above" : `< ${micros(bucket.below_us)}`); made.querySelector("i").style.width = `${bucket.count / most * 100}%`; text(made.children[2], count(bucket.count));
  });
}

// Numbers inside of a message, by their path: pose.x, ranges[3].
function numbers(value, path, found) {
  if (typeof value === "number" && Number.isFinite(value)) found.push([path || "value", value]);
  else if (value && typeof value === "object") for (const [name, inner] of Object.entries(value)) { if (found.length >= MOST_FIELDS) return; numbers(inner, Array.isArray(value) ? `${path}[${name}]` : path ? `${path}.${name}` : name, found); }
}

function addFields(record) {
  const found = Object.entries(record.numbers ?? {});  // of a message that is cut; else they are in it
  if (!record.cut) numbers(record.payload, "", found);
  if (!found.length) return;
  now.times.push(Date.parse(record.time) / 1000);
  for (const [name, value] of found) (now.series[`field/${name}`] ??= new Array(now.times.length - 1).fill(null)).push(value);
  for (const values of Object.values(now.series)) while (values.length < now.times.length) values.push(null);
  if (now.times.length > MOST_SAMPLES) { now.times.shift(); for (const values of Object.values(now.series)) values.shift(); }
  one("channel-fields").hidden = false;
  showFields();
}

function showFields() { if (now.times.length) fields.show(now.times, now.series, Math.max(10, now.times[now.times.length - 1] - now.times[0]), one("field-filter").value.trim()); }
one("field-filter").addEventListener("input", showFields);
