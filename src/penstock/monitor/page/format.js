// Numbers and elements as the page shows them.

// A foreign text as `penstock ls` prints it: what is not printable is escaped (\u202e), so that no name reads as another.
// Only what is shown: an address that is asked for stays as it is.
export const printable = text => String(text ?? "").replace(/(?![\t\n])[\p{C}\p{Zl}\p{Zp}]/gu, sign => {
  const code = sign.codePointAt(0), hex = code.toString(16);
  return code < 0x100 ? `\\x${hex.padStart(2, "0")}` : code < 0x10000 ? `\\u${hex.padStart(4, "0")}` : `\\U${hex.padStart(8, "0")}`;
});

export function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = printable(text);
  return made;
}

function scaled(value, step) {
  let at = 0;
  const prefixes = ["", "k", "M", "G", "T"];
  while (Math.abs(value) >= step && at < prefixes.length - 1) { value /= step; at++; }
  return [value, prefixes[at]];
}
const digits = value => Math.abs(value) >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(3);

export const rate = hz => { const [value, prefix] = scaled(hz, 1000); return `${digits(value)}${prefix ? " " + prefix : ""}/s`; };
export const bytes = count => { const [value, prefix] = scaled(count, 1000); return `${digits(value)} ${prefix}B`; };
export const count = number => Math.round(number).toLocaleString("en-US");
export const micros = us => us < 1000 ? `${digits(us)} µs` : us < 1e6 ? `${digits(us / 1000)} ms` : `${digits(us / 1e6)} s`;
export const short = value => { const [part, prefix] = scaled(value, 1000); return digits(part) + prefix; };
export const span = seconds => seconds < 120 ? `${Math.round(seconds)} s` : seconds < 600 ? `${+(seconds / 60).toFixed(1)} min` : seconds < 3600 ? `${Math.round(seconds / 60)} min` : seconds < 36000 ? `${+(seconds / 3600).toFixed(1)} h` : seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
export const UNITS = { hz: rate, us: micros, count: value => Math.abs(value) < 10000 ? digits(value) : short(value), megabytes: value => bytes(value * 1e6), bytes: value => bytes(value) + "/s" };

// The middle of a long name goes: its beginning says which reach, its end which channel. Where another name would look the
// same, as much of the beginning is kept as tells them apart; where there is no room for that, a part that no other has.
let known = [];
export function compareNames(names) {
  const shown = names.map(printable);
  if (shown.length === known.length && shown.every((name, at) => name === known[at])) return;
  known = shown;
  fitted.clear();
}
function cut(text, most, head = Math.ceil((most - 1) / 3)) {
  return text.length <= most ? text : text.slice(0, head) + "…" + text.slice(text.length - (most - 1 - head));
}
const begins = (a, b) => { let many = 0; while (many < a.length && a[many] === b[many]) many++; return many; };
const ends = (a, b) => { let many = 0; while (many < a.length && a[a.length - 1 - many] === b[b.length - 1 - many]) many++; return many; };
export function middle(text, most) {
  const plain = cut(text, most), others = known.filter(name => name !== text);
  if (plain === text || !others.some(name => cut(name, most) === plain)) return plain;
  // How much each other name begins and ends with alike: it looks the same where both cover what is kept.
  const alike = others.map(name => [begins(name, text), ends(name, text)]);
  for (let head = Math.ceil((most - 1) / 3); head < most; head++) if (!alike.some(([begin, end]) => begin >= head && end >= most - 1 - head)) return cut(text, most, head);
  for (let at = text.indexOf("/"); at >= 0; at = text.indexOf("/", at + 1)) {
    const part = text.slice(at, at + most - 2), whole = part.slice(0, part.lastIndexOf("/") + 1);
    const kept = [whole, part].find(found => found.length > 1 && !others.some(name => name.includes(found)));
    if (kept) return `…${kept}${text.endsWith(kept) ? "" : "…"}`;
  }
  return plain;
}

// As much of a text as is so wide, in a font as CSS names it: `shorten` gives it with at most so many letters.
const pen = document.createElement("canvas").getContext("2d");
export function fit(text, room, font, shorten) {
  const width = Math.max(24, room);
  const asked = `${font}|${Math.round(width)}|${text}`, known = fitted.get(asked);
  if (known !== undefined) return known;
  pen.font = font;
  let most = text.length, shown = text;
  while (most > 1 && pen.measureText(shown).width > width) shown = shorten(text, most = Math.min(most - 1, Math.ceil(most * width / pen.measureText(shown).width)));
  if (fitted.size > 5000) fitted.clear();
  fitted.set(asked, shown);
  return shown;
}
const fitted = new Map();
// A long name in an element that is so wide at most; all of it in its title.
export function nameIn(where, name, width) {
  const style = getComputedStyle(document.body);
  text(where, fit(printable(name), width, `${where.dataset.weight ?? 400} ${where.dataset.size ?? "14px"} ${style.fontFamily}`, middle));
  where.title = printable(name);
}
export const end = (text, most) => text.length <= most ? text : text.slice(0, most - 1) + "…";

export const WORDS = { ok: "flowing", idle: "idle", late: "late", losing: "losing", stuck: "stuck", books: "ledger does not balance" };
export const WORST_FIRST = ["books", "stuck", "losing", "late", "ok", "idle"];
export const TROUBLES = ["books", "stuck", "losing", "late"];
export const worst = words => WORST_FIRST.find(word => words.includes(word)) ?? "idle";

export function text(where, value) { const shown = printable(value); if (where.textContent !== shown) where.textContent = shown; }

// Make the children of `parent` show `items`, in order: elements are made once for each key and then updated, so that only
// what changed is drawn again.
export function reconcile(parent, items, key, make, update) {
  const known = parent.known ??= new Map();
  const wanted = new Set();
  let before = null;
  for (const item of items) {
    const id = key(item);
    wanted.add(id);
    let made = known.get(id);
    if (!made) { made = make(item); known.set(id, made); }
    update(made, item);
    const next = before ? before.nextSibling : parent.firstChild;
    if (next !== made) parent.insertBefore(made, next);
    before = made;
  }
  for (const [id, made] of known) if (!wanted.has(id)) { made.remove(); known.delete(id); }
}
