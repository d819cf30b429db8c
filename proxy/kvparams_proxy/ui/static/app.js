// The page: signs in, follows the snapshots, and has each section show them.

import { Admin } from "./admin.js";
import { openDialog } from "./dialogs.js";
import { byId, h, setData, setText } from "./dom.js";
import { EnginesPanel } from "./engines.js";
import { showFlow } from "./flow.js";
import { count, words } from "./format.js";
import { History, isUnhealthy, readSnapshot } from "./history.js";
import { LatencyPanel } from "./latency.js";
import { showPrefixes } from "./prefixes.js";
import { RequestsPanel } from "./requests.js";
import { showErrors, showStores } from "./side.js";
import { SnapshotStream } from "./stream.js";
import { showSummary } from "./summary.js";

const TOKEN = "kvparams token";
const THEME = "kvparams theme";
const THEMES = ["system", "light", "dark"];
const ANNOUNCE_MS = 10000;

const admin = new Admin();
const history = new History();
const latency = new LatencyPanel();
const engines = new EnginesPanel((id) => {
  const engine = latest?.engines.find((each) => each.id === id);
  if (engine) admin.openEngine(engine);
}, () => admin.askEngine());
const requests = new RequestsPanel(openDialog);
let stream = null;
let latest = null;
let lostAt = 0;
let retryAt = 0;

function signIn(token) {
  remember(TOKEN, token, sessionStorage);
  admin.token = token;
  byId("login").hidden = true;
  setStatus("waiting", "connecting");
  stream?.close();
  stream = new SnapshotStream(token, { opened, snapshot: taken, lost, refused });
  stream.open();
}

function opened(access) {
  admin.isAdmin = access === "admin";
  engines.setAdmin(admin.isAdmin);
  setText(byId("access"), admin.isAdmin ? "admin" : "viewer");
  for (const id of ["access", "leave", "page", "sections"]) byId(id).hidden = false;
}

function taken(raw) {
  latest = readSnapshot(raw);
  history.add(latest);
  if (lostAt) announce("Connected again.");
  lostAt = 0;
  byId("banner").hidden = true;
  setData(byId("page"), "stale", false);
  const unhealthy = latest.engines.filter(isUnhealthy).length;
  const engineText = unhealthy ? `${count(unhealthy)} of ${count(latest.engines.length)} engines unhealthy` : "healthy";
  if (latest.status === "ok") setStatus(unhealthy ? "degraded" : "ok", engineText);
  else setStatus(latest.status, unhealthy ? `${latest.status}: ${engineText}` : latest.status);
  announceState();
  if (!document.hidden) show();
}

function show() {
  if (!latest) return;
  showFacts(latest);
  showSummary(latest, history);
  showFlow(latest);
  latency.show(history);
  engines.show(latest);
  requests.show(latest);
  showPrefixes(latest);
  showStores(latest);
  showErrors(latest);
}

function showFacts(snapshot) {
  const modes = snapshot.modes.map((mode) => mode.use).join(", ");
  const facts = byId("facts");
  const text = [`${modes}`, snapshot.policy, snapshot.workers > 1 ? `${count(snapshot.workers)} workers` : "", snapshot.version].filter(Boolean).join(" · ");
  if (facts.dataset.text === text && facts.dataset.admin === String(admin.isAdmin)) return;
  setData(facts, "text", text);
  setData(facts, "admin", admin.isAdmin);
  facts.replaceChildren(text);
  if (admin.isAdmin) facts.append(" ", h("button", { type: "button", class: "quiet", text: "Switch mode", on: { click: () => admin.askMode(latest) } }));
}

function lost(why, retryMs) {
  lostAt ||= Date.now();
  retryAt = Date.now() + retryMs;
  setStatus("waiting", "reconnecting");
  if (latest) setData(byId("page"), "stale", true);
  byId("banner").hidden = false;
  showLoss(why);
}

function showLoss(why) {
  const banner = byId("banner");
  if (!banner.firstElementChild) {
    banner.replaceChildren(h("span"), " ", h("button", { type: "button", class: "plain", text: "Try now", on: { click: () => stream.retry() } }));
  }
  const age = latest ? `What is shown is from ${Math.max(1, Math.round((lostAt - 0 ? Date.now() / 1000 - latest.time : 0)))} s ago. ` : "";
  setText(banner.firstElementChild, `Reconnecting to the proxy. ${age}${why}`);
}

function refused() {
  forget();
  byId("login-error").hidden = false;
  setText(byId("login-error"), "The proxy does not accept this token.");
  showLogin();
}

function showLogin() {
  for (const id of ["page", "sections", "access", "leave", "banner"]) byId(id).hidden = true;
  byId("login").hidden = false;
  byId("facts").replaceChildren();
  setData(byId("facts"), "text", "");
  setStatus("waiting", "signed out");
  byId("token").focus();
}

function forget() {
  sessionStorage.removeItem(TOKEN);
  admin.token = "";
}

function setStatus(state, text) {
  const status = byId("status");
  setData(status, "state", state);
  setText(status, text);
  document.title = state === "ok" ? "kvparams" : `${text} · kvparams`;
}

// for people who do not see the page: what has changed, not more often than every ten seconds

let announcedAt = 0;
let announced = "";

function announceState() {
  const bad = latest.engines.filter(isUnhealthy);
  const text = bad.length ? `${words(latest.status)}: ${count(bad.length)} of ${count(latest.engines.length)} engines are not well` : `${latest.status === "ok" ? "healthy" : latest.status}: all ${count(latest.engines.length)} engines are well`;
  if (text === announced || Date.now() - announcedAt < ANNOUNCE_MS) return;
  announced = text;
  announce(text);
}

function announce(text) {
  announcedAt = Date.now();
  setText(byId("announcer"), text);
}

// the theme

function setTheme(theme) {
  remember(THEME, theme, localStorage);
  const isDark = theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  setText(byId("theme"), theme[0].toUpperCase() + theme.slice(1));
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
  setData(byId("theme"), "theme", theme);
}

function remember(name, value, storage) {
  try {
    storage.setItem(name, value);
  } catch {
    // a browser that keeps nothing shows the page all the same
  }
}

function recall(name, storage) {
  try {
    return storage.getItem(name);
  } catch {
    return null;
  }
}

function tokenOfLink() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) window.history.replaceState(null, "", location.pathname + location.search);
  return given;
}

byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(byId("theme").dataset.theme) + 1) % THEMES.length]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(byId("theme").dataset.theme));
byId("leave").addEventListener("click", () => {
  stream?.close();
  forget();
  showLogin();
});
byId("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("login-error").hidden = true;
  const token = byId("token").value.trim();
  byId("token").value = "";
  signIn(token);
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  stream?.retry();
  show();
});
addEventListener("hashchange", () => {
  const token = tokenOfLink();
  if (token) signIn(token);
});
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(show, 150);
});

setTheme(THEMES.includes(recall(THEME, localStorage)) ? recall(THEME, localStorage) : "system");
const token = tokenOfLink() ?? recall(TOKEN, sessionStorage);
if (token) signIn(token);
else showLogin();
