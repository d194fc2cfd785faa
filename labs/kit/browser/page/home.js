// The list of the labs: what is done of them, and how to go on in a terminal.

import { drawLaptop, tellBoard } from "./board.js";

document.getElementById("board").textContent = tellBoard();
drawLaptop(document.getElementById("laptop"));
