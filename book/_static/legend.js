// The notation panel. Its button is a link to the notation page; here it opens that page's tables beside
// the text. They come in a script of their own, when they are first asked for.

addEventListener("DOMContentLoaded", () => {
  const button = document.querySelector(".btn-legend-button");
  if (!button) return;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  let panel;

  const load = source => new Promise((done, failed) => {
    const script = Object.assign(document.createElement("script"), {src: new URL(source, root), onload: done, onerror: failed});
    document.head.append(script);
  });

  // A page without formulas has not loaded what sets them.
  const typeset = async () => {
    if (!window.MathJax) {
      window.MathJax = {options: {enableMenu: false}, startup: {typeset: false}};
      await load("_static/mathjax/tex-svg.js");
    }
    await MathJax.startup.promise;
    await MathJax.typesetPromise([panel]);
  };

  const build = async () => {
    await load("_static/legend-tables.js");
    const page = new URL(legendTables.page, root);
    panel = document.createElement("dialog");
    panel.className = "legend-panel";
    panel.setAttribute("aria-labelledby", "legend-title");
    panel.innerHTML = `<div class="legend-head"><h2 id="legend-title">Notation</h2><a href="${page}">The whole page</a>
      <button type="button">Close</button></div><div class="tex2jax_process" tabindex="-1">${legendTables.tables}</div>`;
    for (const link of panel.querySelectorAll("a[href]")) link.href = new URL(link.getAttribute("href"), page);
    panel.querySelector("button").addEventListener("click", close);
    panel.addEventListener("keydown", event => event.key === "Escape" && close());
    document.body.append(panel);
    await typeset();
  };

  const close = () => {
    panel.close();
    button.setAttribute("aria-expanded", "false");
    button.focus();
  };

  const open = async () => {
    if (!panel) await build();
    panel.show();
    button.setAttribute("aria-expanded", "true");
    panel.querySelector("button").focus();
  };

  button.removeAttribute("target");
  button.setAttribute("role", "button");
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", event => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;  // a new tab shows the page
    event.preventDefault();
    if (panel?.open) close();
    else open().catch(() => location.assign(button.href));
  });
  button.addEventListener("keydown", event => {
    if (event.key === " ") {
      event.preventDefault();
      button.click();
    } else if (event.key === "Escape" && panel?.open) close();
  });
});
