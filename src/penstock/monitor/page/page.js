// The page: one event of the server each second brings what changed. One view is shown at a time, and only that one is drawn.
import { TROUBLES, WORDS, WORST_FIRST, bytes, compareNames, count, element, micros, nameIn, printable, rate, reconcile, span as spanText, text, worst } from "/format.js";
import { draw, nodeUnder } from "/graph.js";
import { keep, kept } from "/choices.js";
import { Plot, choice } from "/plots.js";
import { counted, rateOf } from "/sums.js";
import { Tail } from "/tail.js";
import { showChannel, leaveChannel } from "/channel.js";

const one = id => document.getElementById(id);
const KEEP = 900, MOST_ROWS = 300, MOST_QUEUES = 60, MOST_TROUBLES = 50, FIRST_TROUBLES = 6, FIRST_ON_NARROW = 3;  // the others are behind a button
const SILENT_MS = 2000, LOOK_MS = 500;  // the server says something each second; so long without a word is no connection
const view = { state: null, handles: new Map(), times: [], series: {}, long: null, span: 60, spanChosen: false, paused: false, sort: "health", up: false, heard: 0, lost: false, name: "overview", channel: "", chosen: "", events: null };
const plots = [...document.querySelectorAll(".plots canvas[data-plot]:not(#field-plot)")].map(canvas => new Plot(canvas, () => showPlots()));

const bare = handle => handle.channel;
const isTail = handle => handle.kind === "tail";  // somebody looks at messages: no part of what is watched
const isBrokerQueue = handle => handle.room === "broker" && handle.kind === "queue";
const hasPage = handle => !handle.name_cut;  // else nothing can be asked for it
const channelLink = address => `#channel=${encodeURIComponent(address)}`;
// How long an idle handle has been idle is counted here: it changes every second, and nothing else of the handle does.
function reason(handle) {
  if (handle.health !== "idle") return handle.reasons[0] ?? "";
  if (handle.last_s) return `no message for ${spanText(Math.max(0, view.state.time_s - handle.last_s))}`;
  return handle.messages ? "no message since the monitor began" : "no message yet";
}

function showHead(state) {
  compareNames([...new Set([...view.handles.values()].map(handle => handle.channel))]);
  const words = [...view.handles.values()].filter(handle => !handle.internal).map(handle => handle.health), word = worst(words);
  const many = words.filter(found => TROUBLES.includes(found)).length;
  one("status").className = `pill ${view.lost ? "stuck" : word}`;
  text(one("status"), view.lost ? "no connection" : many ? `${WORDS[word]}: ${many} in trouble` : WORDS[word]);
  one("pipelines-link").hidden = ![...view.handles.values()].some(handle => handle.room === "spark");
  text(one("version"), state.version ?? ""); text(one("looked"), `looked at ${new Date(state.time_s * 1000).toLocaleTimeString()}`);
  const alarm = one("alarm"), open = [...view.handles.values()].filter(handle => handle.health === "books");
  alarm.hidden = !open.length;
  if (open.length) text(alarm, `The ledger${open.length > 1 ? "s" : ""} of ${open.length} handle${open.length > 1 ? "s do" : " does"} not balance: ` +
    open.slice(0, 10).map(handle => `${handle.kind} of ${handle.where} (pid ${handle.pid})`).join(", "));
}

function showSums(state) {
  const sum = state.summary;
  text(one("sum-in"), rate(sum.published_hz)); text(one("sum-out"), rate(sum.delivered_hz)); text(one("sum-bytes"), bytes(sum.bytes_hz) + "/s");
  text(one("sum-lost"), count(sum.lost)); one("tile-lost").className = `tile ${sum.lost ? "bad" : "good"}`; one("sum-lost").dataset.value = sum.lost;
  text(one("sum-handles"), count(sum.handles)); text(one("sum-processes"), `handles in ${sum.processes} process${sum.processes === 1 ? "" : "es"}`);
  text(one("sum-shared"), bytes(state.shared.penstock_bytes ?? 0)); text(one("sum-shared-of"), `shared memory, ${bytes(state.shared.free_bytes ?? 0)} free`);
}

function showTrouble(state) {
  const troubled = [...view.handles.values()].filter(handle => TROUBLES.includes(handle.health) && !handle.internal)
    .sort((a, b) => WORST_FIRST.indexOf(a.health) - WORST_FIRST.indexOf(b.health) || b.lost - a.lost || a.where.localeCompare(b.where));
  // Those of one kind at one place are one row, the worst one's.
  const rows = new Map();
  for (const handle of troubled) { const id = isBrokerQueue(handle) ? handle.key : [handle.pid, handle.kind, handle.health, handle.where].join("\n"); if (!rows.has(id)) rows.set(id, { id, handle, many: 0, late: false }); rows.get(id).many++; }
  // Many of one kind in one process are most likely one trouble: after the first five they come last.
  const alike = new Map();
  for (const row of rows.values()) { const kind = `${row.handle.pid} ${row.handle.kind} ${row.handle.health}`, many = (alike.get(kind) ?? 0) + 1; alike.set(kind, many); row.late = many > 5; }
  const sorted = [...rows.values()].sort((a, b) => a.late - b.late);
  one("stuck").classList.toggle("none", !troubled.length); one("stuck").classList.toggle("some", troubled.length > 0);
  text(one("stuck-note"), troubled.length ? `${count(troubled.length)} of ${count(view.handles.size)} handles${sorted.length > MOST_TROUBLES ? `, ${MOST_TROUBLES} are listed, all of them under Handles` : ""}` : "nothing is losing, stuck or late");
  const listed = Math.min(sorted.length, MOST_TROUBLES), first = window.innerWidth > 900 ? FIRST_TROUBLES : FIRST_ON_NARROW, folds = listed > first + 1;
  one("stuck-more").hidden = !folds; text(one("stuck-more"), view.allTroubles ? "show fewer" : `show ${listed - first} more`);
  reconcile(one("stuck-list"), sorted.slice(0, folds && !view.allTroubles ? first : listed), row => row.id, makeTrouble, (line, { handle, many }) => {
    const [pill, link, who, why, help] = line.children;
    pill.className = `pill ${handle.health}`; text(pill, WORDS[handle.health]);
    text(link, handle.where); link.href = hasPage(handle) ? channelLink(bare(handle)) : "#handles";
    text(who, `${many > 1 ? `${count(many)} ${handle.kind}s` : handle.kind} in ${handle.program} (${handle.pid})`); text(why, handle.reasons.join("; "));
    const actions = helpful(handle, state.actions ?? []);
    reconcile(help, actions, action => action, action => button(action, () => act(action, (action === "redrive" && whoseDead(handle)) || view.handles.get(handle.key))), () => {});
  });
}

function makeTrouble() {
  const line = element("li");
  line.append(element("span", "pill"), element("a", "name"), element("span", "who"), element("span", "why"), element("span", "help"));
  return line;
}

// The actions that help this handle; everything else is explained on the channel's page, to which its name leads.
function helpful(handle, allowed) {
  if (!isBrokerQueue(handle)) return [];
  const wanted = [handle.state === "paused" && "resume", whoseDead(handle) && "redrive"];
  return wanted.filter(action => action && allowed.includes(action));
}

// The queue whose dead letters a queue holds, by the name that a broker gives it; the action is that queue's.
function whoseDead(handle) {
  const queue = handle.name.endsWith(".dead") ? handle.name.slice(0, -".dead".length) : "";
  return queue && [...view.handles.values()].find(other => isBrokerQueue(other) && other.pid === handle.pid && other.name === queue);
}

// The queue that holds this one's dead letters, where there is one.
function deadOf(handle) {
  return [...view.handles.values()].find(other => isBrokerQueue(other) && other.pid === handle.pid && other.name === `${handle.name}.dead`);
}

function button(label, pressed) {
  const made = element("button", "", label);
  made.type = "button"; made.addEventListener("click", event => { event.stopPropagation(); pressed(); });
  return made;
}

async function act(action, handle) {
  const lasting = { purge: "Drop every message that waits in", redrive: "Send the dead letters back to" }[action];
  if (lasting && !window.confirm(`${lasting} ${printable(handle.name)}?`)) return;
  try {
    const answer = await fetch(`/api/actions/${action}`, { method: "POST", headers: { "X-Penstock-Action": "1", "Content-Type": "application/json" }, body: JSON.stringify({ queue: handle.name, pid: handle.pid }) });
    const said = await answer.json();
    say(said.done ?? said.error, !answer.ok);
  } catch { say(`${action} of ${handle.name}: the monitor did not answer; whether it was done is not known`, true); }
}

// What an action did, at the foot of the page; success goes by itself, trouble stays until it was read.
function say(what, bad) {
  const box = one("said");
  clearTimeout(view.saying);
  box.classList.toggle("bad", bad); text(box.firstChild, what); box.hidden = false;
  if (!bad) view.saying = setTimeout(() => { box.hidden = true; }, 8000);
}
one("said").lastChild.addEventListener("click", () => { one("said").hidden = true; });

function channels() {
  const found = new Map();
  for (const handle of view.handles.values()) {
    if (handle.internal || isTail(handle) || handle.kind === "link") continue;  // a link is a line of the graph
    if (!found.has(bare(handle))) found.set(bare(handle), []);
    found.get(bare(handle)).push(handle);
  }
  return [...found].map(([where, handles]) => channelOf(where, handles));
}

// A channel as far as these handles are on it.
function channelOf(where, handles) {
  return { where, handles, room: where.split(":")[0], rate_hz: rateOf(handles), programs: new Set(handles.map(handle => handle.program)),
    pids: new Set(handles.map(handle => handle.pid)), health: worst(handles.map(handle => handle.health)) };
}

// The groups that a channel is in, and what of it belongs there: of a process's group only what that process does.
const GROUPS = {
  reach: channel => [[channel.room, channel]],
  prefix: channel => [[channel.where.replace(/^([a-z]+:(?:\/\/[^/]*|\/?[^/.#]*)[/.#]?).*$/, "$1"), channel]],
  process: channel => [...channel.pids].map(pid => {
    const own = channelOf(channel.where, channel.handles.filter(handle => handle.pid === pid));
    return [`${own.handles[0].program} (${pid})`, own];
  }),
};

function showChannels() {
  const wanted = one("search").value.trim().toLowerCase(), groups = new Map(), all = channels();
  const fits = channel => wanted.split(/\s+/).every(word => `${channel.where} ${channel.room} ${[...channel.programs].join(" ")} ${[...channel.pids].join(" ")} ${channel.health}`.toLowerCase().includes(word));
  const fitting = all.filter(fits);
  one("channel-none").hidden = fitting.length > 0 || !wanted;
  text(one("channel-count"), wanted ? `${count(fitting.length)} of ${count(all.length)}` : count(all.length));
  for (const channel of fitting) for (const [group, part] of GROUPS[one("group-by").value](channel)) {
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(part);
  }
  const once = new Set(one("group-by").value === "process" ? [...groups.values()].flatMap(counted) : counted(fitting));
  const sumOf = members => members.reduce((sum, member) => sum + (once.has(member) ? member.rate_hz : 0), 0);
  const sorted = [...groups].map(([name, members]) => ({ name, members, health: worst(members.map(member => member.health)), rate_hz: sumOf(members) }))
    .sort((a, b) => WORST_FIRST.indexOf(a.health) - WORST_FIRST.indexOf(b.health) || b.rate_hz - a.rate_hz || a.name.localeCompare(b.name));
  reconcile(one("channel-list"), sorted, group => group.name, group => makeGroup(group, sorted.length, fitting.length), (made, group) => {
    const [dot, name, many, speed] = made.firstChild.children;
    dot.className = `dot ${group.health}`; text(name, group.name); text(many, count(group.members.length)); text(speed, rate(group.rate_hz));
    if (wanted && fitting.length <= 40) made.open = true;
    if (!made.open) return;  // what is folded is not drawn
    group.members.sort((a, b) => WORST_FIRST.indexOf(a.health) - WORST_FIRST.indexOf(b.health) || b.rate_hz - a.rate_hz || a.where.localeCompare(b.where));
    reconcile(made.lastChild, group.members.slice(0, 200), channel => channel.where, makeChannel, (row, channel) => {
      row.children[0].className = `dot ${channel.health}`; text(row.children[2], rate(channel.rate_hz));
      nameIn(row.children[1], channel.where, (made.clientWidth || 300) - (row.children[2].offsetWidth || 60) - 50);
      row.classList.toggle("on", view.chosen === channel.where);
    });
  });
}

function makeGroup(group, groups, all) {
  const made = element("details"), head = element("summary");
  made.open = all <= 40 || groups === 1 && all <= 300 || groups <= 3 && group.members.length <= 60;
  head.append(element("span", "dot"), element("span", "name"), element("small"), element("b", "n"));
  made.append(head, element("div"));
  made.addEventListener("toggle", () => show());
  return made;
}

function makeChannel(channel) {
  const row = element("button", "channel"), name = element("span", "name");
  row.type = "button"; row.title = printable(channel.where); row.dataset.where = channel.where;
  row.append(element("span", "dot"), name, element("b", "n"));
  row.addEventListener("click", () => goTo(view.chosen === channel.where ? "" : channel.where));
  row.addEventListener("dblclick", () => { location.hash = channelLink(channel.where); });
  return row;
}

// What is chosen is part of the page's address, so that it outlives a reload and can be sent to somebody.
const overviewLink = where => where ? `#overview=${encodeURIComponent(where)}` : "#overview";
function goTo(where) {
  if (location.hash === overviewLink(where)) chooseChannel(where);
  else location.hash = overviewLink(where);
}

async function chooseChannel(where) {
  view.chosen = where;
  document.querySelector("nav a[data-view=overview]").href = overviewLink(where);
  // The server draws up the graph of what is chosen; while the page is frozen, nothing else of the answer is shown.
  if (view.paused) view.state.graph = (await (await fetch(`/api/state?chosen=${encodeURIComponent(where)}`)).json()).graph;
  else listen();
  show();
}

function showFlow(state) {
  const graph = state.graph, chosen = [...view.handles.values()].filter(handle => bare(handle) === view.chosen);
  one("show-all").hidden = !view.chosen; one("channel-link").hidden = !chosen.some(hasPage); one("channel-link").href = channelLink(view.chosen);
  text(one("flow-note"), view.chosen ? view.chosen + (chosen.some(handle => handle.name_cut) ? " · its name is too long to follow" : "") : graph.left_out ? `${count(graph.nodes.length)} of ${count(graph.nodes.length + graph.left_out)} boxes: trouble and the busiest first; choose a channel to see it` : "");
  draw(graph, one("graph"), view.handles.size ? "Nothing flows here. Choose another channel, or show all." : "Nothing of Penstock is open on this machine yet. Try: penstock demo");
}

function cell(kind, value, shown) { const made = element("td", kind, shown); made.dataset.value = value ?? ""; return made; }
const COLUMNS = [["rate", "n rate", h => h.rate_hz, rate], ["kind", "", h => h.kind, String], ["pid", "n", h => h.pid, String], ["matched", "n matched", h => h.matched, count], ["delivered", "n delivered", h => h.delivered, count],
  ["dropped", "n dropped_count", h => h.dropped_count, count], ["expired", "n expired", h => h.expired, count], ["in_flight", "n in_flight", h => h.in_flight, count], ["again", "n redelivered", h => h.redelivered, count],
  ["p50", "n p50", h => h.latency_p50_us, micros], ["p99", "n p99", h => h.latency_p99_us, micros]];

function showLedger() {
  const wanted = one("ledger-filter").value.toLowerCase().split(/\s+/), insides = one("internals").checked;
  const rows = [...view.handles.values()].filter(h => (insides || !h.internal) && wanted.every(word => `${h.where} ${h.kind} ${h.pid} ${h.program} ${h.health}`.toLowerCase().includes(word)));
  const key = view.sort, way = view.up ? 1 : -1;
  const value = h => key === "health" ? -WORST_FIRST.indexOf(h.health) : h[key];
  rows.sort((a, b) => way * (typeof value(a) === "string" ? value(a).localeCompare(value(b)) : (value(a) ?? -1) - (value(b) ?? -1)) || a.where.localeCompare(b.where) || a.kind.localeCompare(b.kind) || a.pid - b.pid);
  text(one("ledger-more"), rows.length > MOST_ROWS ? `the first ${MOST_ROWS} of ${count(rows.length)}; name an address, a kind or a pid above to see others` : "");
  reconcile(one("ledger-table").tBodies[0], rows.slice(0, MOST_ROWS), h => h.key, h => {
    const row = element("tr"), where = cell("where", h.where), link = element("a"), health = cell("health");
    row.dataset.key = h.key; row.dataset.where = h.where; row.dataset.kind = h.kind;
    if (hasPage(h)) link.href = channelLink(bare(h));
    where.append(link);
    health.append(element("span", "pill"));
    row.append(where, health, ...COLUMNS.map(([, kind]) => cell(kind)), cell("why"));
    return row;
  }, (row, h) => {
    nameIn(row.cells[0].firstChild, h.where, window.innerWidth > 700 ? 320 : 140);
    COLUMNS.forEach(([, , of, shown], at) => {
      const made = row.cells[at + 2], now = of(h);
      made.dataset.value = now ?? ""; text(made, now === null ? "–" : shown(now));
    });
    row.querySelector(".dropped_count").title = Object.entries(h.dropped).filter(([, n]) => n).map(([why, n]) => `${count(n)} ${why}`).join(", ");
    const health = row.cells[1], pill = health.firstChild;
    health.dataset.value = h.health; pill.className = `pill ${h.health}`; text(pill, WORDS[h.health]); text(row.lastChild, reason(h));
  });
}

function makeMeter(kind) {
  const made = element("div", kind), head = element("div", "head"), track = element("div", "track");
  head.append(element("span"), element("span")); track.append(element("i")); made.append(head, track, element("small"), element("span", "help"));
  return made;
}
function fillMeter(made, title, right, part, full, note) {
  const [name, figure] = made.firstChild.children, fill = made.children[1].firstChild;
  text(figure, right); nameIn(name, title, (made.clientWidth || 330) - (figure.offsetWidth || 110) - 12); text(made.children[2], note);
  fill.className = full ? "full" : ""; fill.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
}

function showQueues(state) {
  const bounded = [...view.handles.values()].filter(h => !h.internal && !isTail(h) && (h.capacity || h.depth || h.lag || h.kind === "queue")).sort((a, b) => (b.depth / (b.capacity || 1e9)) - (a.depth / (a.capacity || 1e9)) || b.lag - a.lag || a.where.localeCompare(b.where));
  one("queue-empty").hidden = bounded.length > 0;
  text(one("queue-more"), bounded.length > MOST_QUEUES ? `the fullest ${MOST_QUEUES} of ${count(bounded.length)}; the handles have all` : "");
  reconcile(one("queue-list"), bounded.slice(0, MOST_QUEUES), h => h.key, h => { const made = makeMeter("meter"); made.dataset.key = h.key; return made; }, (made, h) => {
    const bound = h.capacity ? `${count(h.depth)} of ${count(h.capacity)} held` : h.room === "shm" ? `${count(h.depth)} held` : `${count(h.depth)} waiting`;
    fillMeter(made, h.where, bound + (h.lag ? ` · ${count(h.lag)} behind` : ""), h.capacity ? h.depth / h.capacity : h.depth ? .03 : 0, h.capacity && h.depth >= h.capacity, [h.kind, `pid ${h.pid}`, isBrokerQueue(h) ? consumers(h.peers) : "", deadOf(h)?.depth ? `${count(deadOf(h).depth)} dead letters` : "", h.state].filter(Boolean).join(" · "));
    made.dataset.depth = h.depth; made.dataset.capacity = h.capacity;
    const usable = isBrokerQueue(h) ? (state.actions ?? []).filter(action => action !== (h.state === "paused" ? "pause" : "resume") && !(action === "redrive" && whoseDead(h))) : [];
    reconcile(made.lastChild, usable, action => action, action => button(action, () => act(action, view.handles.get(h.key))), () => {});
  });
}

const consumers = many => many ? `${count(many)} consumer${many === 1 ? "" : "s"}` : "no consumer";

function showPipelines() {
  const found = [...view.handles.values()].filter(h => h.room === "spark");
  reconcile(one("pipeline-list"), found, h => h.key, h => { const made = makeMeter("meter"); made.dataset.key = h.key; return made; }, (made, h) => {
    const all = h.delivered + h.lag;
    fillMeter(made, h.where.replace(/^spark:/, ""), `${count(h.delivered)} rows · ${rate(h.rate_hz)} · ${h.lag ? count(h.lag) + " behind" : "caught up"}`, all ? h.delivered / all : 0, false, h.state);
    made.dataset.rows = h.delivered;
  });
}

function showProcesses(state) {
  const handles = new Map();
  for (const handle of view.handles.values()) handles.set(handle.pid, (handles.get(handle.pid) ?? 0) + 1);
  reconcile(one("process-table").tBodies[0], [...state.processes].sort((a, b) => b.cores - a.cores || a.pid - b.pid).slice(0, MOST_ROWS), process => process.pid, process => {
    const row = element("tr"); row.dataset.pid = process.pid;
    row.append(cell("n"), cell("program"), cell("n"), cell("n"), cell("n"), cell("n"), cell("command"));
    return row;
  }, (row, process) => {
    const many = handles.get(process.pid) ?? 0;
    [[process.pid, String(process.pid)], [process.program, process.program], [many, count(many)], [process.resident_bytes, bytes(process.resident_bytes)], [process.cores, process.cores.toFixed(2)], [process.threads, String(process.threads)], [process.command, process.command]]
      .forEach(([value, shown], at) => { row.cells[at].dataset.value = value; text(row.cells[at], shown); });
    row.cells[6].title = printable(process.command);
  });
}

const NOT_READ = ["broker", "writer"];  // what they hold is read topic by topic
function showTailChoices() {
  const select = one("tail-address"), known = [...new Set([...view.handles.values()].filter(h => h.address && !h.internal && !NOT_READ.includes(h.kind) && h.room !== "bus").map(bare))].filter(address => !address.startsWith("bus:")).sort();
  const now = [...select.options].map(option => option.value).join("\n");
  if (now === known.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...known.map(address => { const option = element("option", "", address); option.value = address; return option; }));
  if (known.includes(chosen)) select.value = chosen;
}

function showPlots() {
  chooseByHistory();
  const data = view.span > KEEP && view.long ? view.long : view;
  one("zoom-out").hidden = !choice.zoom;
  text(one("plots-note"), view.span > KEEP && !view.long ? "reading the history" : "drag to look closer, click a name to hide it");
  for (const plot of plots) plot.show(data.times, data.series, view.span, one("plots-filter").value.trim());
}

const VIEWS = { overview: state => { showTrouble(state); showSums(state); showChannels(); showFlow(state); }, plots: showPlots, handles: showLedger, queues: showQueues, pipelines: showPipelines, processes: showProcesses, tail: showTailChoices,
  channel: state => showChannel(view.channel, [...view.handles.values()].filter(handle => bare(handle) === view.channel && !handle.internal), state) };

function show() {
  if (!view.state) return;
  showHead(view.state);
  if (Object.hasOwn(VIEWS, view.name)) VIEWS[view.name](view.state);
  document.body.dataset.looked = view.state.time_s;
}

function navigate() {
  // Typed by hand, a % may stand for itself.
  const hash = location.hash.slice(1).replace(/(%[0-9a-f]{2})+/gi, found => { try { return decodeURIComponent(found); } catch { return found; } });
  const [name, rest] = hash.split(/=(.*)/s);
  const before = view.name, chosen = view.chosen;
  view.name = name in VIEWS ? name : "overview"; view.channel = rest ?? "";
  for (const part of document.querySelectorAll(".view")) part.hidden = part.dataset.view !== view.name;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("on", link.dataset.view === view.name);
  if (before === "channel") leaveChannel();
  if (before === "tail" && view.name !== "tail" && tail.source) tail.end("ended: another view was opened");
  if (view.name === "channel") one("channel-plots").onclick = () => { one("plots-filter").value = view.channel; };
  if (before !== view.name) window.scrollTo(0, 0);
  if (view.name === "overview" && (rest ?? "") !== chosen) chooseChannel(rest ?? "");
  else show();
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

function listen() {
  view.events?.close();
  view.events = new EventSource(`/api/events?chosen=${encodeURIComponent(view.chosen)}`);
  view.events.addEventListener("beat", hear);
  view.events.onerror = lose;
  view.events.onmessage = event => {
    const { state, sample, whole, gone } = JSON.parse(event.data);
    hear(); extend(sample);
    if (view.paused) { view.missed = true; return; }
    if (whole) view.handles.clear();
    for (const key of gone) view.handles.delete(key);
    for (const handle of state.handles) view.handles.set(handle.key, handle);
    view.state = state; show();
  };
}

function hear() {
  view.heard = performance.now();
  if (view.lost) { view.lost = false; if (view.state) showHead(view.state); }
}
function lose() {
  view.lost = true;
  if (view.state) showHead(view.state); else { one("status").className = "pill stuck"; text(one("status"), "no connection"); }
}
// A browser tries again by itself where a connection broke, and not where it was refused.
function checkConnection() {
  if (performance.now() - view.heard > SILENT_MS) lose();
  if (view.events.readyState === EventSource.CLOSED) listen();
}

async function begin() {
  const history = await (await fetch("/api/history?last=900")).json();
  view.times = history.times; view.series = history.series;
  view.heard = performance.now();
  navigate();
  if (!view.events) listen();
  setInterval(checkConnection, LOOK_MS);
  setInterval(readLong, 60000);
}

async function readLong() {
  if (view.span <= KEEP) { view.long = null; return; }
  const answer = await fetch(`/api/history?span=${view.span}`);
  if (answer.ok) { view.long = await answer.json(); if (view.name === "plots") showPlots(); }
}

one("pause").addEventListener("click", () => {
  view.paused = !view.paused;
  one("pause").setAttribute("aria-pressed", view.paused); text(one("pause"), view.paused ? "Frozen" : "Freeze");
  if (!view.paused && view.missed) { view.missed = false; listen(); }  // begins with everything again
});
one("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep("theme", root.dataset.theme);
  show();
});
function choose(seconds) {
  for (const known of document.querySelectorAll("[data-span]")) known.classList.toggle("on", Number(known.dataset.span) === seconds);
  view.span = seconds; choice.zoom = null; text(one("span-text"), seconds === 60 ? "minute" : seconds === 86400 ? "day" : spanText(seconds));
  readLong();
}
// Until the user chooses a span: the shortest one that shows all samples of this hour.
function chooseByHistory() {
  const seconds = view.times.length ? view.times[view.times.length - 1] - view.times[0] : 0;
  const span = [60, 300, 900].find(most => seconds <= most) ?? 900;
  if (!view.spanChosen && span !== view.span) choose(span);
}
for (const known of document.querySelectorAll("[data-span]")) known.addEventListener("click", () => { view.spanChosen = true; keep("span", Number(known.dataset.span)); choose(Number(known.dataset.span)); showPlots(); });
one("log-axis").addEventListener("click", () => { chooseAxis(!choice.log); keep("log", choice.log); showPlots(); });
function chooseAxis(log) { choice.log = log; one("log-axis").setAttribute("aria-pressed", log); }
one("zoom-out").addEventListener("click", () => { choice.zoom = null; showPlots(); });
for (const head of document.querySelectorAll("th[data-sort]")) head.addEventListener("click", () => {
  sortBy(head.dataset.sort, view.sort === head.dataset.sort ? !view.up : !head.classList.contains("n") && head.dataset.sort !== "health"); show();
});
function sortBy(key, up) {
  view.sort = key; view.up = up;
  for (const head of document.querySelectorAll("th[data-sort]")) { head.classList.toggle("sorted", head.dataset.sort === key); head.classList.toggle("up", head.dataset.sort === key && up); }
  keep("sort", [key, up]);
}
for (const id of ["ledger-filter", "search", "plots-filter"]) one(id).addEventListener("input", () => { keep(id, one(id).value); show(); });
one("group-by").addEventListener("change", () => { keep("group-by", one("group-by").value); show(); });
one("internals").addEventListener("change", () => { keep("internals", one("internals").checked); show(); });
one("graph").addEventListener("keydown", event => { const node = event.key === "Enter" && nodeUnder(event.target); if (node) goTo(node.id === view.chosen ? "" : node.id); });
one("stuck-more").addEventListener("click", () => { view.allTroubles = !view.allTroubles; show(); });
one("show-all").addEventListener("click", () => goTo(""));
window.addEventListener("resize", () => requestAnimationFrame(show));
window.addEventListener("hashchange", navigate);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);

one("graph").addEventListener("pointermove", event => {
  const node = nodeUnder(event.target), tip = one("tip");
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = [printable(node.label), `${rate(node.rate_hz)}, ${count(node.messages)} messages, ${count(node.lost)} lost`, node.pids.length ? `pid ${node.pids.slice(0, 8).join(", ")}` : "", ...node.reasons.map(printable)].filter(Boolean).join("\n");
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 330)}px`; tip.style.top = `${event.clientY + 14}px`;
});
one("graph").addEventListener("pointerleave", () => { one("tip").hidden = true; });
one("graph").addEventListener("click", event => { const node = nodeUnder(event.target); if (node) goTo(node.id === view.chosen ? "" : node.id); });

// What was chosen before the page was loaded again.
function restore() {
  const theme = kept("theme", ["light", "dark"].includes.bind(["light", "dark"])), sort = kept("sort", Array.isArray), span = kept("span", Number.isInteger);
  if (theme) document.documentElement.dataset.theme = theme;
  for (const id of ["ledger-filter", "search", "plots-filter"]) one(id).value = kept(id, value => typeof value === "string") ?? "";
  one("group-by").value = kept("group-by", value => value in GROUPS) ?? "reach";
  one("internals").checked = kept("internals", value => value === true) ?? false;
  chooseAxis(kept("log", value => value === true) ?? false);
  if (sort && document.querySelector(`th[data-sort="${CSS.escape(sort[0])}"]`)) sortBy(sort[0], sort[1] === true);
  if (span && document.querySelector(`[data-span="${span}"]`)) { view.spanChosen = true; choose(span); }
}

const tail = new Tail({ form: one("tail-form"), start: one("tail-start"), note: one("tail-note"), list: one("tail-list"), address: () => one("tail-address").value, filter: () => one("tail-filter").value });
restore();
begin();
