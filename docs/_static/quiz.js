// Says below each quiz how many questions were right at the first try. Without this file the quiz works as well.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const quiz of document.querySelectorAll(".quiz")) {
    const questions = [...quiz.querySelectorAll(".question")];
    const score = document.createElement("p");
    score.className = "score";
    score.setAttribute("role", "status");
    quiz.append(score);
    const first = new Map();
    for (const question of questions) {
      for (const choice of question.querySelectorAll(".choice")) {
        choice.addEventListener("toggle", () => {
          if (!choice.open) return;
          if (!first.has(question)) first.set(question, choice.classList.contains("right"));
          const right = [...first.values()].filter(Boolean).length;
          score.textContent = `${right} right at the first try, ${first.size} of ${questions.length} answered`;
        });
      }
    }
  }
});
