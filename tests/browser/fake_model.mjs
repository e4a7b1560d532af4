// The model of a widget, without a notebook: values, listeners, and a list of the messages that the view has sent.

export class FakeModel {
  constructor(state) {
    this.values = { state, change: {} };
    this.comm_live = true;
    this.listeners = []; // [name, listener]
    this.sent = [];
    this.answers = {}; // by query: the kernel's answer, sent at once; a list: one after the other, the last one again
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
    if (this.sendError) throw new Error(this.sendError);
    this.sent.push(content);
    let answer = this.answers[content.ask];
    if (Array.isArray(answer)) answer = answer.length > 1 ? answer.shift() : answer[0];
    if (answer) queueMicrotask(() => this.deliver({ ...answer, reply: content.id }));
  }

  update(values) {
    Object.assign(this.values, values);
    for (const name of Object.keys(values)) this.fire(`change:${name}`);
  }

  deliver(content) {
    this.fire("msg:custom", content);
  }

  fire(name, ...content) {
    for (const [other, listener] of [...this.listeners]) if (other === name) listener.call(this, ...content);
  }
}
