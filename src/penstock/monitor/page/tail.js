// A tail: messages of one address as they come, in a list that keeps the last 300.
import { bytes, element, printable, text } from "/format.js";

export class Tail {
  // `form` starts and stops it when it is sent, else `start` when it is pressed; `onRecord` gets each message too.
  constructor({ form, start, note, list, address, filter, onRecord }) {
    Object.assign(this, { start, note, list, address, filter: filter ?? (() => ""), onRecord: onRecord ?? (() => {}), source: null });
    if (form) form.addEventListener("submit", event => { event.preventDefault(); this.toggle(); });
    else start.addEventListener("click", () => this.toggle());
  }

  toggle() {
    if (this.source) { this.end("ended"); return; }
    const query = new URLSearchParams({ address: this.address(), filter: this.filter() });
    this.list.replaceChildren(); text(this.note, "opening"); text(this.start, "Stop");
    this.source = new EventSource(`/api/tail?${query}`);
    this.source.onerror = async () => {
      this.end("ended");
      const answer = await fetch(`/api/tail?${query}`, { signal: AbortSignal.timeout(2000) }).catch(() => null);
      if (answer && !answer.ok) text(this.note, (await answer.json()).error);
    };
    this.source.onmessage = message => this.show(JSON.parse(message.data));
  }

  end(note) {
    this.source?.close(); this.source = null;
    text(this.start, "Start"); if (note) text(this.note, note);
  }

  show(record) {
    if (record.opened) { text(this.note, `subscribed to ${record.opened}`); return; }
    if (record.error) { this.end(record.error); return; }
    const line = element("li");
    if ("skipped" in record) {
      const lost = Object.entries(record.lost).map(([reason, n]) => `${n} lost (${reason})`).join(", ");
      if (!record.skipped && !lost) return;
      line.className = "lost"; line.textContent = [record.skipped ? `${record.skipped} more not shown` : "", lost].filter(Boolean).join(", ");
    } else {
      const body = typeof record.payload === "string" ? record.payload : JSON.stringify(record.payload);
      line.append(element("em", "", `${record.ordinal}`), element("em", "", record.time.slice(11, 23)), element("em", "", bytes(record.size)), printable(body) + (record.cut ? " …" : ""));
      this.onRecord(record);
    }
    const low = this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 30;
    this.list.append(line);
    while (this.list.children.length > 300) this.list.firstChild.remove();
    if (low) this.list.scrollTop = this.list.scrollHeight;
  }
}
