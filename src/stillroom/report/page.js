// Draws every figure in the colours of the reader's screen, and again when the screen changes.
"use strict";
(() => {
  const drawings = JSON.parse(document.getElementById("drawings").textContent);
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

  draw();
  scheme.addEventListener("change", draw);
})();
