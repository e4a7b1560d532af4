/**
 * The dashboard, an anywidget in plain DOM. It shows the state that the kernel sends, and sends the user's requests back; all
 * decisions are the driver's. `npm run build` bundles these modules into nbelastic/notebook/static/dashboard.js.
 */
/** @import { Model } from "./connection.js" */
import { View } from "./view.js";

/** @param {{model: Model, el: HTMLElement}} context */
function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
