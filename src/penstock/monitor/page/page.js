// The page shows one event of the server each second. It computes and keeps no figures of its own.
import { Plot, UNITS, bytes, count, element, micros, rate } from "/plots.js";
import { draw, nodeUnder } from "/graph.js";

const one = id => document.getElementById(id);
const plots = [...document.querySelectorAll(".plots canvas")].map(canvas => new Plot(canvas));
const WORDS = { ok: "flowing", idle: "idle", late: "late", losing: "losing", stuck: "stuck", books: "books do not close" };
const view = { state: null, times: [], series: {}, span: 60, chosen: false, paused: false, sort: "where", up: true, heard: 0 };
const KEEP = 900;

function text(id, value) { if (one(id).textContent !== value) one(id).textContent = value; }

function showSums(state) {
  const sum = state.summary;
  text("sum-in", rate(sum.published_hz)); text("sum-out", rate(sum.delivered_hz)); text("sum-bytes", bytes(sum.bytes_hz) + "/s");
  text("sum-lost", count(sum.lost)); one("tile-lost").className = `tile ${sum.lost ? "bad" : "good"}`; one("sum-lost").dataset.value = sum.lost;
  text("sum-handles", count(sum.handles)); text("sum-processes", `handles in ${sum.processes} process${sum.processes === 1 ? "" : "es"}`);
  text("sum-shared", bytes(state.shared.penstock_bytes ?? 0)); text("sum-shared-of", `shared memory, ${bytes(state.shared.free_bytes ?? 0)} free`);
  text("version", state.version ?? ""); text("looked", `looked at ${new Date(state.time_s * 1000).toLocaleTimeString()}`);
  const worst = ["books", "stuck", "losing", "late"].find(word => state.handles.some(handle => handle.health === word));
  const word = worst ?? (state.handles.some(handle => handle.health === "ok") ? "ok" : "idle");
  one("status").className = `pill ${word}`; text("status", WORDS[word]);
  const alarm = one("alarm");
  alarm.hidden = !sum.alarms;
  if (sum.alarms) alarm.textContent = `The books of ${sum.alarms} handle${sum.alarms > 1 ? "s do" : " does"} not close: ` +
    state.handles.filter(handle => handle.health === "books").map(handle => `${handle.kind} of ${handle.where} (pid ${handle.pid})`).join(", ");
}

function showStuck(state) {
  const troubled = state.handles.filter(handle => ["books", "stuck", "losing", "late"].includes(handle.health));
  one("stuck").hidden = !troubled.length;
  one("stuck-list").replaceChildren(...troubled.slice(0, 30).map(handle => {
    const line = element("li");
    line.append(element("span", `pill ${handle.health}`, WORDS[handle.health]), ` ${handle.kind} of `, element("b", "", handle.where), ` in ${handle.program} (pid ${handle.pid}): ${handle.reasons.join("; ")}`);
    return line;
  }));
}

function cell(kind, value, shown) { const made = element("td", kind, shown); made.dataset.value = value ?? ""; return made; }

function showLedger(state) {
  const wanted = one("ledger-filter").value.toLowerCase();
  const rows = state.handles.filter(h => !wanted || `${h.where} ${h.kind} ${h.pid} ${h.program} ${h.health}`.toLowerCase().includes(wanted));
  const key = view.sort, way = view.up ? 1 : -1;
  rows.sort((a, b) => way * (typeof a[key] === "string" ? a[key].localeCompare(b[key]) : (a[key] ?? -1) - (b[key] ?? -1)) || a.where.localeCompare(b.where) || a.kind.localeCompare(b.kind) || a.pid - b.pid);
  text("ledger-more", rows.length > 500 ? `the first 500 of ${count(rows.length)}; name an address, a kind or a pid above to see others` : "");
  one("ledger-table").tBodies[0].replaceChildren(...rows.slice(0, 500).map(h => {
    const row = element("tr"); row.dataset.key = h.key; row.dataset.where = h.where; row.dataset.kind = h.kind;
    const why = Object.entries(h.dropped).filter(([, n]) => n).map(([reason, n]) => `${count(n)} ${reason}`).join(", ");
    const last = element("td"); last.append(element("span", `pill ${h.health}`, WORDS[h.health]), h.reasons.length && h.health !== "idle" ? h.reasons[0] : h.health === "idle" ? h.reasons[0] ?? "" : "books close"); last.dataset.value = h.health;
    const dropped = cell("n dropped_count", h.dropped_count, count(h.dropped_count)); if (why) dropped.title = why;
    const where = cell("where", h.where, h.where); where.title = h.where;
    row.append(where, cell("", h.kind, h.kind), cell("n", h.pid, String(h.pid)), cell("n rate", h.rate_hz, rate(h.rate_hz)), cell("n matched", h.matched, count(h.matched)), cell("n delivered", h.delivered, count(h.delivered)), dropped, cell("n expired", h.expired, count(h.expired)), cell("n in_flight", h.in_flight, count(h.in_flight)), cell("n redelivered", h.redelivered, count(h.redelivered)), cell("n p50", h.latency_p50_us, h.latency_p50_us === null ? "–" : micros(h.latency_p50_us)), cell("n p99", h.latency_p99_us, h.latency_p99_us === null ? "–" : micros(h.latency_p99_us)), last);
    return row;
  }));
}

function meter(title, right, part, full) {
  const made = element("div", "meter"), head = element("div", "head"), track = element("div", "track"), fill = element("i", full ? "full" : "");
  const name = element("span", "", title); name.title = title;
  head.append(name, element("span", "", right)); fill.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  track.append(fill); made.append(head, track);
  return made;
}

function showQueues(state) {
  const bounded = state.handles.filter(h => h.capacity || h.depth || h.lag || h.kind === "queue").sort((a, b) => (b.depth / (b.capacity || 1e9)) - (a.depth / (a.capacity || 1e9)) || a.where.localeCompare(b.where));
  one("queue-empty").hidden = bounded.length > 0;
  text("queue-more", bounded.length > 60 ? `the fullest 60 of ${count(bounded.length)}; the ledger has all` : "");
  one("queue-list").replaceChildren(...bounded.slice(0, 60).map(h => {
    const bound = h.capacity ? `${count(h.depth)} of ${count(h.capacity)} held` : h.room === "shm" ? `${count(h.depth)} held` : `${count(h.depth)} waiting`;
    const made = meter(`${h.where} · ${h.kind} · pid ${h.pid}`, bound + (h.lag ? ` · ${count(h.lag)} behind` : ""), h.capacity ? h.depth / h.capacity : h.depth ? .03 : 0, h.capacity && h.depth >= h.capacity);
    made.dataset.key = h.key; made.dataset.depth = h.depth; made.dataset.capacity = h.capacity;
    if (h.state) made.append(element("small", "", h.state));
    if (h.kind === "queue" && h.room === "broker") for (const action of state.actions ?? []) {
      if (action === (h.state === "paused" ? "pause" : "resume")) continue;
      const button = element("button", "", action); button.type = "button";
      button.addEventListener("click", () => act(action, h));
      made.querySelector(".head").lastChild.append(button);
    }
    return made;
  }));
}

async function act(action, handle) {
  const lasting = { purge: "Drop every message that waits in", redrive: "Send the dead letters back to" }[action];
  if (lasting && !window.confirm(`${lasting} ${handle.name}?`)) return;
  const answer = await fetch(`/api/actions/${action}`, { method: "POST", headers: { "X-Penstock-Action": "1", "Content-Type": "application/json" }, body: JSON.stringify({ queue: handle.name, pid: handle.pid }) });
  const said = await answer.json();
  window.alert(said.done ?? said.error);
}

function showPipelines(state) {
  const found = state.handles.filter(h => h.room === "spark");
  one("pipelines").hidden = !found.length; one("pipelines-link").hidden = !found.length;
  one("pipeline-list").replaceChildren(...found.map(h => {
    const all = h.delivered + h.lag;
    const made = meter(h.where.replace(/^spark:/, ""), `${count(h.delivered)} rows · ${rate(h.rate_hz)} · ${h.lag ? count(h.lag) + " behind" : "caught up"}`, all ? h.delivered / all : 0, false);
    made.append(element("small", "", h.state)); made.dataset.key = h.key; made.dataset.rows = h.delivered;
    return made;
  }));
}

function showProcesses(state) {
  const handles = new Map();
  for (const handle of state.handles) handles.set(handle.pid, (handles.get(handle.pid) ?? 0) + 1);
  one("process-table").tBodies[0].replaceChildren(...state.processes.sort((a, b) => a.pid - b.pid).map(process => {
    const row = element("tr"), command = cell("command", process.command, process.command);
    command.title = process.command; row.dataset.pid = process.pid;
    row.append(cell("n", process.pid, String(process.pid)), command, cell("n", handles.get(process.pid), String(handles.get(process.pid) ?? 0)), cell("n", process.resident_bytes, bytes(process.resident_bytes)), cell("n", process.cores, process.cores.toFixed(2)), cell("n", process.threads, String(process.threads)));
    return row;
  }));
}

function showTailChoices(state) {
  const select = one("tail-address"), known = [...new Set(state.handles.map(h => h.address).filter(a => a && !a.startsWith("bus:")))].sort();
  const now = [...select.options].map(option => option.value).join("\n");
  if (now === known.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...known.map(address => { const option = element("option", "", address); option.value = address; return option; }));
  if (known.includes(chosen)) select.value = chosen;
}

function show() {
  const state = view.state;
  if (!state) return;
  showSums(state); showStuck(state); showLedger(state); showQueues(state); showPipelines(state); showProcesses(state); showTailChoices(state);
  draw(state.graph, one("graph"));
  text("flow-note", state.graph.left_out ? `the busiest ${state.graph.nodes.length}; ${state.graph.left_out} more in the ledger` : "");
  chooseByHistory();
  for (const plot of plots) plot.show(view.times, view.series, view.span);
  document.body.dataset.looked = state.time_s;
}

function extend(sample) {
  const time = sample.times[0];
  if (time === undefined || time <= (view.times[view.times.length - 1] ?? 0)) return;
  view.times.push(time);
  for (const [name, values] of Object.entries(sample.series)) {
    if (!(name in view.series)) view.series[name] = new Array(view.times.length - 1).fill(null);
    view.series[name].push(values[0]);
  }
  for (const values of Object.values(view.series)) while (values.length < view.times.length) values.push(null);
  if (view.times.length > KEEP) { view.times.shift(); for (const values of Object.values(view.series)) values.shift(); }
}

async function begin() {
  const history = await (await fetch("/api/history?last=900")).json();
  view.times = history.times; view.series = history.series;
  const events = new EventSource("/api/events");
  events.onmessage = event => {
    const { state, sample } = JSON.parse(event.data);
    view.heard = Date.now(); extend(sample);
    if (!view.paused) { view.state = state; show(); }
  };
  setInterval(() => { if (Date.now() - view.heard > 6000) { one("status").className = "pill stuck"; text("status", "no connection"); } }, 2000);
}

one("pause").addEventListener("click", () => {
  view.paused = !view.paused;
  one("pause").setAttribute("aria-pressed", view.paused); text("pause", view.paused ? "Frozen" : "Freeze");
});
one("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("penstock-theme", root.dataset.theme); } catch { /* private window */ }
  show();
});
try { const kept = localStorage.getItem("penstock-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* private window */ }
function choose(span) {
  for (const button of document.querySelectorAll("[data-span]")) button.classList.toggle("on", Number(button.dataset.span) === span);
  view.span = span; text("span-text", span === 60 ? "minute" : `${span / 60} minutes`);
}
// Until the user chooses a span: the shortest one that shows all samples.
function chooseByHistory() {
  const seconds = view.times.length ? view.times[view.times.length - 1] - view.times[0] : 0;
  const span = [60, 300, 900].find(one => seconds <= one) ?? 900;
  if (!view.chosen && span !== view.span) choose(span);
}
for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => { view.chosen = true; choose(Number(button.dataset.span)); show(); });
for (const head of document.querySelectorAll("th[data-sort]")) head.addEventListener("click", () => {
  view.up = view.sort === head.dataset.sort ? !view.up : !head.classList.contains("n"); view.sort = head.dataset.sort;
  for (const other of document.querySelectorAll("th")) other.classList.remove("sorted", "up");
  head.classList.add("sorted"); head.classList.toggle("up", view.up); show();
});
one("ledger-filter").addEventListener("input", show);
window.addEventListener("resize", () => requestAnimationFrame(show));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);

one("graph").addEventListener("pointermove", event => {
  const node = nodeUnder(event.target), tip = one("tip");
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = [node.label, `${rate(node.rate_hz)}, ${count(node.messages)} messages, ${count(node.lost)} lost`, node.pids.length ? `pid ${node.pids.join(", ")}` : "", ...node.reasons].filter(Boolean).join("\n");
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 330)}px`; tip.style.top = `${event.clientY + 14}px`;
});
one("graph").addEventListener("pointerleave", () => { one("tip").hidden = true; });

// Numbers of the tail's messages, by field: {times, series}, of the last minute.
const FIELD_SPAN_S = 60, FIELD_POINTS = 50 * FIELD_SPAN_S;
const fieldPlot = new Plot(one("tail-canvas"));
let points = null;
function plotFields(record) {
  one("tail-plot").hidden = false;
  points.times.push(Date.parse(record.time) / 1000);
  for (const [name, value] of Object.entries(record.fields)) (points.series[`field/${name}`] ??= []).push(value);
  if (points.times.length > FIELD_POINTS) { points.times.shift(); for (const values of Object.values(points.series)) values.shift(); }
  if (!points.drawing) { points.drawing = true; requestAnimationFrame(() => { points.drawing = false; fieldPlot.show(points.times, points.series, FIELD_SPAN_S); }); }
}

let tail = null;
function endTail(note) { tail?.close(); tail = null; text("tail-start", "Start"); if (note) text("tail-note", note); }
one("tail-form").addEventListener("submit", async event => {
  event.preventDefault();
  if (tail) { endTail("ended"); return; }
  const query = new URLSearchParams({ address: one("tail-address").value, filter: one("tail-filter").value, fields: one("tail-fields").value });
  points = { times: [], series: {}, drawing: false }; one("tail-plot").hidden = true;
  one("tail-list").replaceChildren(); text("tail-note", "opening"); text("tail-start", "Stop");
  tail = new EventSource(`/api/tail?${query}`);
  tail.onerror = async () => {
    endTail("ended");
    const answer = await fetch(`/api/tail?${query}`, { signal: AbortSignal.timeout(2000) }).catch(() => null);
    if (answer && !answer.ok) text("tail-note", (await answer.json()).error);
  };
  tail.onmessage = message => showTail(JSON.parse(message.data));
});
function showTail(record) {
  if (record.opened) {
    text("tail-note", `subscribed to ${record.opened}` + (record.numeric.length ? `; fields that can be plotted: ${record.numeric.join(", ")}` : ""));
    one("tail-numeric").replaceChildren(...record.numeric.map(name => Object.assign(element("option"), { value: name })));
    return;
  }
  if (record.error) { endTail(record.error); return; }
  const line = element("li");
  if ("skipped" in record) {
    const lost = Object.entries(record.lost).map(([reason, n]) => `${n} lost (${reason})`).join(", ");
    if (!record.skipped && !lost) return;
    line.className = "lost"; line.textContent = [record.skipped ? `${record.skipped} more not shown` : "", lost].filter(Boolean).join(", ");
  } else {
    if (record.fields) plotFields(record);
    const body = typeof record.payload === "string" ? record.payload : JSON.stringify(record.payload);
    line.append(element("em", "", `${record.ordinal}`), element("em", "", record.time.slice(11, 23)), element("em", "", `${bytes(record.size)}`), body + (record.cut ? " …" : ""));
  }
  const list = one("tail-list"), low = list.scrollTop + list.clientHeight > list.scrollHeight - 30;
  list.append(line);
  while (list.children.length > 300) list.firstChild.remove();
  if (low) list.scrollTop = list.scrollHeight;
}

begin();
