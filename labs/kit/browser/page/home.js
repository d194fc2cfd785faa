// The list of the labs: what is done of them, and how to go on in a terminal.

import { drawBoard, drawLaptop } from "./board.js";

drawBoard(document.getElementById("board"));
drawLaptop(document.getElementById("laptop"));
