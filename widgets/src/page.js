/** The page of `nbelastic dashboard`: a view of the dashboard. The token is in the address, after the #. */
import dashboard from "./dashboard.js";
import { element } from "./dom.js";
import { SocketModel } from "./socket_model.js";

const el = document.querySelector("main") ?? document.body;
/** @type {() => void} */
let close = () => {};
const refuse = () => {
  close();
  const text = "This address has no valid token. Open the whole address that nbelastic dashboard has printed last.";
  el.append(element("p", { class: "nbe", role: "alert" }, text));
};
const model = new SocketModel(`ws://${location.host}/socket`, location.hash.slice(1), refuse);
model.on("change:state", () => {
  document.title = `${model.get("state").name} · nbelastic`;
});
close = dashboard.render({ model, el });
addEventListener("hashchange", () => location.reload());
