/** The model of a page that has no notebook: it speaks with the command `nbelastic dashboard` over a WebSocket. */

const RETRY = 2000; // ms after a closed connection
export const WRONG_TOKEN = 4001; // why the server has closed the connection; nbelastic/cli/dashboard_server.py has it too

/** It has the interface of anywidget's model, as far as a view uses it. */
export class SocketModel {
  /** @param {string} address @param {string} token @param {() => void} onRefusal called if the token is wrong */
  constructor(address, token, onRefusal) {
    this.address = address;
    this.token = token;
    this.onRefusal = onRefusal;
    this.peer = "server";
    this.comm_live = true;
    /** @type {Record<string, any>} */
    this.values = { state: undefined, change: {} };
    /** @type {[string, Function][]} */
    this.listeners = [];
    this.connect();
  }

  connect() {
    const socket = new WebSocket(this.address);
    this.socket = socket;
    socket.addEventListener("open", () => socket.send(JSON.stringify({ token: this.token })));
    socket.addEventListener("message", ({ data }) => this.receive(JSON.parse(data)));
    socket.addEventListener("close", ({ code }) => {
      this.setLive(false);
      if (code === WRONG_TOKEN) this.onRefusal();
      else if (this.values.state?.phase !== "finished") setTimeout(() => this.connect(), RETRY);
    });
  }

  receive(/** @type {any} */ content) {
    this.setLive(true);
    if (content.reply !== undefined) return this.fire("msg:custom", content);
    Object.assign(this.values, content);
    for (const name of Object.keys(content)) this.fire(`change:${name}`);
  }

  setLive(/** @type {boolean} */ live) {
    if (this.comm_live === live) return;
    this.comm_live = live;
    this.fire("comm_live_update");
  }

  get(/** @type {string} */ name) {
    return this.values[name];
  }

  on(/** @type {string} */ name, /** @type {Function} */ listener) {
    this.listeners.push([name, listener]);
  }

  off(/** @type {string} */ name, /** @type {Function} */ listener) {
    this.listeners = this.listeners.filter(([other, old]) => other !== name || old !== listener);
  }

  send(/** @type {unknown} */ content) {
    if (this.socket?.readyState !== WebSocket.OPEN) throw new Error("the connection is closed");
    this.socket.send(JSON.stringify(content));
  }

  fire(/** @type {string} */ name, /** @type {any[]} */ ...content) {
    for (const [other, listener] of [...this.listeners]) if (other === name) listener.call(this, ...content);
  }
}
