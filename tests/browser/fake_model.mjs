// What the notebook gives a widget, without a notebook: values, listeners, and a list of what was sent up.

export class FakeModel {
  constructor(state) {
    this.values = { state, change: {} };
    this.comm_live = true;
    this.listeners = []; // [name, listener]
    this.sent = [];
    this.answers = {}; // by question: what the kernel would reply, at once
  }

  get(name) {
    return this.values[name];
  }

  on(name, listener) {
    this.listeners.push([name, listener]);
  }

  off(name, listener) {
    this.listeners = this.listeners.filter(([other, old]) => other !== name || old !== listener);
  }

  send(content) {
    if (this.broken) throw new Error(this.broken);
    this.sent.push(content);
    const answer = this.answers[content.ask];
    if (answer) queueMicrotask(() => this.say({ ...answer, reply: content.id }));
  }

  tell(values) {
    Object.assign(this.values, values);
    for (const name of Object.keys(values)) this.fire(`change:${name}`);
  }

  say(content) {
    this.fire("msg:custom", content);
  }

  fire(name, ...content) {
    for (const [other, listener] of [...this.listeners]) if (other === name) listener.call(this, ...content);
  }
}
