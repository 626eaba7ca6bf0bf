// Draws every figure in the colours of the reader's screen, and lets a reader walk along the tokens of a text.
"use strict";
(() => {
  const block = (id) => {
    const element = document.getElementById(id);
    return element && JSON.parse(element.textContent);
  };

  const drawings = block("drawings");
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const options = { displayModeBar: false, responsive: true };

  const painted = (value) => {
    if (typeof value === "string") return (scheme.matches && drawings.dark[value]) || value;
    if (Array.isArray(value)) return value.map(painted);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
  };

  const draw = () => {
    for (const figure of drawings.figures) {
      Plotly.react(figure.id, painted(figure.data), painted(figure.layout), options);
    }
  };

  if (drawings && drawings.figures.length) {
    draw();
    scheme.addEventListener("change", draw);
    window.addEventListener("beforeprint", () => {
      for (const figure of drawings.figures) Plotly.react(figure.id, figure.data, figure.layout, options);
    });
    window.addEventListener("afterprint", draw);
  }

  // -- tokens --------------------------------------------------------------------------------------------

  const tokens = block("tokens");
  const panel = document.getElementById("token-detail");
  if (!tokens || !panel) return;

  const made = (name, text, className) => {
    const element = document.createElement(name);
    element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const percent = (value) => (value === null ? "not known" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`);

  const list = (title, pairs, role) => {
    const box = made("div", "", "choices");
    box.append(made("h4", title, `voice-${role}`));
    const rows = made("ol", "");
    for (const [id, chance] of pairs) {
      const row = made("li", "");
      const bar = made("meter", "");
      bar.value = chance;
      bar.setAttribute("aria-hidden", "true");
      row.append(made("code", tokens.texts[id] ?? `token ${id}`), bar, made("span", percent(chance)));
      rows.append(row);
    }
    box.append(rows);
    return box;
  };

  let chosen = null;
  const show = (element) => {
    const [row, place] = element.dataset.at.split(".").map(Number);
    const found = tokens.rows[row][place];
    if (element === chosen || !found) return;
    if (chosen) chosen.setAttribute("aria-selected", "false");
    chosen = element;
    element.setAttribute("aria-selected", "true");
    const [distance, teacher, student, theirs, ours] = found;
    const words = `distance ${distance.toFixed(2)}; it had ${percent(teacher)} by the teacher, ${percent(student)} by the student`;
    const line = made("p", "", "chosen");
    line.append(made("code", element.textContent.trim() || "white space"), made("span", ` ${words}`));
    const both = made("div", "", "both");
    both.append(list("teacher", theirs, "teacher"), list("student", ours, "student"));
    panel.classList.add("open");
    panel.replaceChildren(line, both);
  };

  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  for (const box of document.querySelectorAll(".tokens")) {
    const all = [...box.querySelectorAll(".token")];
    const find = (event) => event.target.closest(".token");
    box.addEventListener("focusin", (event) => find(event) && show(find(event)));
    box.addEventListener("pointerover", (event) => find(event) && show(find(event)));
    box.addEventListener("click", (event) => find(event) && find(event).focus());
    box.addEventListener("keydown", (event) => {
      const from = all.indexOf(document.activeElement);
      if (from < 0 || !(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const next = all[Math.min(all.length - 1, Math.max(0, from + moves[event.key]))];
      all[from].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }
})();
