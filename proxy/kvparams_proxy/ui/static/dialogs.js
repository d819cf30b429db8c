// One dialog at a time: details, questions and forms.

import { byId, h, replace } from "./dom.js";

/** Opens the dialog with a title, content and buttons. */
export function openDialog(title, content, buttons = []) {
  const dialog = byId("dialog");
  const close = h("button", { type: "button", class: "quiet", text: "Close", on: { click: () => dialog.close() } });
  replace(dialog, h("div", { class: "sheet" }, h("div", { class: "sheet-head" }, h("h2", { id: "dialog-title", text: title }), close), content, buttons.length ? h("div", { class: "sheet-foot" }, buttons) : null));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  return dialog;
}

/** Asks before something is done, and says why it could not be. `act` returns a promise. */
export function confirmAction(title, text, label, act, isDangerous = true) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const go = h("button", { type: "button", class: isDangerous ? "danger" : "primary", text: label });
  const no = h("button", { type: "button", class: "plain", text: "Cancel", on: { click: () => byId("dialog").close() } });
  go.addEventListener("click", () => perform(go, problem, act));
  openDialog(title, [typeof text === "string" ? h("p", { text }) : text, problem], [no, go]);
  no.focus();
}

/** Shows a form; `send` gets the values that were filled in, by name. */
export function askForm(title, text, fields, label, send) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const go = h("button", { type: "submit", class: "primary", text: label });
  const rows = fields.map(({ name, title: shown, options, ...attributes }) => {
    const id = `field-${name}`;
    const field = options ? h("select", { id, name }, options.map((value) => h("option", { value, text: value }))) : h("input", { id, name, autocomplete: "off", spellcheck: "false", ...attributes });
    return h("div", { class: "field" }, h("label", { for: id, text: shown }), field);
  });
  const form = h("form", { class: "sheet-form" }, h("p", { class: "hint", text }), rows, problem, h("div", { class: "sheet-foot" }, go));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    perform(go, problem, () => send(values));
  });
  openDialog(title, form);
  form.querySelector("input, select")?.focus();
}

async function perform(button, problem, act) {
  button.disabled = true;
  problem.hidden = true;
  try {
    await act();
    byId("dialog").close();
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  } finally {
    button.disabled = false;
  }
}
