// Reads the server-sent events of the proxy. `EventSource` cannot send the token, so this reads them itself.

const FIRST_MS = 500;
const LONGEST_MS = 15000;
const SILENT_MS = 10000;
const LONGEST_EVENT = 16 << 20;

/**
 * Follows the snapshots until `close`. After a loss it connects again, at growing intervals.
 *
 * `handlers` are told: `opened(access)`, `snapshot(snapshot)`, `lost(why, retryMs)`, `refused()` for a wrong token.
 */
export class SnapshotStream {
  constructor(token, handlers) {
    this.token = token;
    this.handlers = handlers;
    this.failures = 0;
    this.abort = null;
    this.timer = 0;
    this.isClosed = false;
  }

  open() {
    this.abort = new AbortController();
    this.read(this.abort.signal).then(
      () => this.lose("The connection was closed."),
      (error) => this.lose(error.message),
    );
  }

  /** Connects now rather than later. */
  retry() {
    if (!this.timer) return;
    clearTimeout(this.timer);
    this.timer = 0;
    this.open();
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    clearTimeout(this.watchdog);
    this.abort?.abort();
  }

  async read(signal) {
    this.watch();
    const response = await fetch("ui/events", { headers: { authorization: `Bearer ${this.token}` }, cache: "no-store", signal });
    if (response.status === 401) {
      this.close();
      this.handlers.refused();
      return;
    }
    if (!response.ok) {
      const answer = await response.json().catch(() => ({}));
      throw new Error(answer.error?.message ?? `The proxy answers ${response.status}.`);
    }
    this.handlers.opened(response.headers.get("x-kvparams-access"));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const pieces = [];
    let length = 0;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      let rest = value;
      if (pieces.at(-1)?.endsWith("\n")) {  // the end of an event may come in two chunks
        rest = pieces.pop() + rest;
        length -= rest.length - value.length;
      }
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        pieces.push(rest.slice(0, end));
        this.take(pieces.join(""));
        pieces.length = length = 0;
        rest = rest.slice(end + 2);
      }
      pieces.push(rest);
      length += rest.length;
      if (length > LONGEST_EVENT) throw new Error("The proxy sends too much.");
    }
  }

  take(event) {
    const line = event.split("\n").find((each) => each.startsWith("data: "));
    if (line === undefined) return;
    const snapshot = JSON.parse(line.slice(6));
    this.failures = 0;
    this.watch();
    this.handlers.snapshot(snapshot);
  }

  /** A connection on which nothing comes is as good as lost. */
  watch() {
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => this.abort?.abort(new Error("The proxy has sent nothing for some seconds.")), SILENT_MS);
  }

  lose(why) {
    clearTimeout(this.watchdog);
    if (this.isClosed) return;
    const wait = Math.min(LONGEST_MS, FIRST_MS * 2 ** this.failures) * (0.75 + Math.random() / 2);
    this.failures += 1;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.open();
    }, wait);
    this.handlers.lost(why, wait);
  }
}
