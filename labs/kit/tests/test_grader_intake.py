"""Intake reads the labs' files of a submission, and nothing else, whatever the folder or zip contains."""

import json
import os
import stat
import struct
import zipfile

import pytest

from labs.kit.grader import contents, intake
from labs.kit.grader.names import safe
from labs.kit.judge.manifest import LabError
from labs.kit.tests.files import solution

LABS = ("lab-01", "lab-02")


@pytest.fixture
def read(tmp_path):
    """Write the files of one student, {name: bytes}, and read the submission."""

    def made(files):
        for name, data in files.items():
            path = tmp_path / "ann" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return read_class(tmp_path)["ann"]

    return made


def read_class(folder):
    entries, _ = intake.entries(folder)
    return {entry.student: intake.read(entry, LABS) for entry in entries}


def zipped(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def read_zip(folder, members=(), method=zipfile.ZIP_DEFLATED):
    path = folder / "a.zip"
    return intake.read(intake.Entry("a", (("", zipped(path, members, method) if members else path),)), LABS)


def folders_of(ignored):
    return [line.split(":")[0] for line in ignored]


def test_a_folder_with_files_at_any_depth(read):
    found = read({"course/labs/lab-01/starter.py": b"one", "lab_02.py": b"two", "lab-07.py": b"x"})
    assert found.files == {"lab-01": b"one", "lab-02": b"two"}
    assert found.ignored == ["lab-07.py: lab-07 is not graded here"] and not found.problems


@pytest.mark.parametrize(
    "name",
    ["x/lab_01/starter.py", "lab-01.py", "x/y/lab_01.py", "Lab-01/starter.py", "lab1.py", "Lab 1/Lab01.py",
     "LAB_1.PY", "lab-01-2.py", "lab-01 (1).py", "lab-01/starter-1.py",
     "lab-01-starter.py", "x/lab-01-starter (2).py"],
)  # fmt: skip
def test_known_names(read, name):
    assert read({name: b"one"}).files == {"lab-01": b"one"}


@pytest.mark.parametrize("name", ["starter.py", "work/starter.py", "starter (2).py"])
def test_a_lone_starter_is_that_of_the_only_lab(read, tmp_path, name):
    read({name: b"one"})
    [entry] = intake.entries(tmp_path)[0]
    assert intake.read(entry, ["lab-02"]).files == {"lab-02": b"one"}
    both = read({"lab-02/starter.py": b"two"})
    assert both.files == {"lab-02": b"two"} and both.ignored == [f"{name}: {intake.UNSAID}"]
    alone = intake.read(entry, ["lab-02"])
    assert alone.files == both.files and alone.ignored == [f"{name}: a file that names lab-02 is there"]


@pytest.mark.parametrize(
    "name",
    ["starter.py", "lab-1234.py", "lab-01/starter.pyc", "lab-01/solution.py", "my-lab-01.py", "lab.py",
     "lab-01/x/starter.py", "conftest.py", "lab-01/torch.py", "a.pth", "lab-01/test_lab.py", "01.ipynb"],
)  # fmt: skip
def test_other_files_are_listed_and_not_read(read, name):
    found = read({name: b"one"})
    why = intake.UNSAID if "starter.py" in name else intake.NO_LAB
    line = f"{name}: {why}" if name.endswith((".py", ".ipynb")) else name
    assert (found.files, found.problems, found.ignored) == ({}, {}, [line])


def test_hidden_folders_are_not_read(read, tmp_path):
    found = read({".git/lab-01.py": b"x", "labs/.state/backups/lab-01/starter.py": b"y"})
    assert not found.files and folders_of(found.ignored) == [".git/", "labs/.state/"]
    again = read_zip(tmp_path, [("__MACOSX/lab-01/starter.py", b"x"), ("__MACOSX/b", b"x")])
    assert not again.files and folders_of(again.ignored) == ["__MACOSX/"]


# --------------------------------------------------------------------------------------- two files, one lab


def test_the_file_in_the_fewest_folders_is_taken(read):
    found = read({"lab-01/starter.py": b"new", "old/lab-01/starter.py": b"old"})
    assert found.files == {"lab-01": b"new"}
    assert found.ignored == ["old/lab-01/starter.py: lab-01/starter.py is taken for lab-01"]


def test_two_equally_deep_files_are_refused_if_they_differ(read):
    found = read({"lab-01/starter.py": b"a", "lab-01.py": b"b"})
    assert not found.files and "two files for this lab" in found.problems["lab-01"]
    assert read({"lab-01.py": b"a"}).files == {"lab-01": b"a"}


def test_a_zip_with_one_name_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        found = read_zip(tmp_path, [("lab-01.py", b"a"), ("lab-01.py", b"b"), ("lab-02.py", b"c")])
    assert found.files == {"lab-02": b"c"} and "two files" in found.problems["lab-01"]


# ------------------------------------------------------------------------------------------- odd files


@pytest.mark.parametrize(
    "data, why",
    [(b"", "empty"), (b"\xef\xbb\xbf \n", "empty"), (b"x = '\xe9'", "not UTF-8 text (at byte 5)"),
     ("x = 1".encode("utf-16"), "not UTF-8"), (b"#" * (contents.FILE + 1), "larger than 8 MB"),
     (b"#" * (intake.CODE + 1), "has more than 256 kB of code")],
)  # fmt: skip
def test_a_file_that_cannot_be_judged_is_a_problem_of_its_lab_alone(read, data, why):
    found = read({"lab-01.py": data, "lab-02.py": b"\xef\xbb\xbfx = 2"})
    assert why in found.problems["lab-01"]
    assert found.files["lab-02"].decode("utf-8-sig") == "x = 2" and len(found.files) == 1


def test_a_sparse_file_of_10_gb_is_not_read(read, tmp_path):
    read({"lab-01.py": b""})
    os.truncate(tmp_path / "ann" / "lab-01.py", 10 << 30)
    assert "larger than 8 MB" in read({}).problems["lab-01"]


def test_symbolic_links_are_not_followed(read, tmp_path):
    (secret := tmp_path.parent / "secret").mkdir()
    (secret / "starter.py").write_text("secret")
    read({"lab-02.py": b"two"})
    (tmp_path / "ann" / "lab-01.py").symlink_to(secret / "starter.py")
    (tmp_path / "ann" / "sub").mkdir()
    (tmp_path / "ann" / "sub" / "lab-01").symlink_to(secret)
    (tmp_path / "bob").symlink_to(secret)
    found = read_class(tmp_path)
    assert found["ann"].files == {"lab-02": b"two"}
    assert "symbolic link" in found["ann"].problems["lab-01"]
    assert folders_of(found["ann"].ignored) == ["lab-01.py", "sub/lab-01"]
    assert set(found["bob"].problems) == set(LABS) and "symbolic link" in found["bob"].problems["lab-01"]


def test_a_pipe_does_not_block_the_grader(read, tmp_path):
    read({"x": b""})
    os.mkfifo(tmp_path / "ann" / "lab-01.py")
    assert read({}).ignored == ["lab-01.py: not a file", "x"]


def test_names_with_a_line_end_are_refused_in_one_line(read):
    line, other = read({"lab-01.py\n": b"x", "lab-01\n/starter.py": b"y"}).ignored
    assert "\n" not in line + other and "\\n" in line and "line end" in line


def test_too_many_files_are_refused_and_listed_up_to_a_limit(read, monkeypatch):
    ignored = read({f"{n:03}": b"" for n in range(300)}).ignored
    assert len(ignored) == intake.LISTED + 1 and ignored[-1] == "and 100 more"
    monkeypatch.setattr(contents, "ENTRIES", 299)
    assert "more than 299 files" in read({}).problems["lab-01"]


# ----------------------------------------------------------------------------------------------------- zips


@pytest.mark.parametrize("lab_01", ["work/lab-01/starter.py", "work\\lab-01\\starter.py"])
def test_a_zip_is_read_like_a_folder_also_one_from_windows(tmp_path, lab_01):
    found = read_zip(tmp_path, [(lab_01, b"one"), ("lab_02.py", b"two"), ("conftest.py", b"x"), ("d/", b"")])
    assert found.files == {"lab-01": b"one", "lab-02": b"two"}
    assert found.ignored == [f"conftest.py: {intake.NO_LAB}"]


def test_a_folder_with_the_zip_that_was_handed_in(read, tmp_path):
    (tmp_path / "ann").mkdir()
    zipped(tmp_path / "ann" / "mine.zip", [("lab-01.py", b"one"), ("inner.zip", b"")])
    found = read({})
    assert found.files == {"lab-01": b"one"} and found.ignored == ["mine.zip/inner.zip"]


def test_a_zip_slip_writes_nothing_and_is_listed(tmp_path):
    names = ["../../lab-01.py", "/lab-01.py", "C:/lab-01.py", "a/../lab-01/starter.py"]
    found = read_zip(tmp_path, [(name, b"x") for name in names])
    assert not found.files and len(found.ignored) == len(names)
    assert all("leads out of the submission" in line for line in found.ignored)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_a_name_with_nul_in_a_zip_is_not_the_name_before_it(tmp_path):
    path = zipped(tmp_path / "a.zip", [("lab-01.py_.txt", b"x")])
    path.write_bytes(path.read_bytes().replace(b"lab-01.py_.txt", b"lab-01.py\0.txt"))
    found = read_zip(tmp_path)
    assert not found.files and "\\x00" in found.ignored[0] and "NUL" in found.ignored[0]


LINK = zipfile.ZipInfo("lab-01/starter.py")
LINK.external_attr = (stat.S_IFLNK | 0o777) << 16


@pytest.mark.parametrize(
    "members, method, why",
    [
        ([(LINK, "/etc/passwd")], zipfile.ZIP_DEFLATED, "symbolic link"),
        ([(f"{n}", bytes(10 << 20)) for n in range(6)], zipfile.ZIP_DEFLATED, "more than 50 MB"),
        ([("lab-01.py", bytes(1000))], zipfile.ZIP_BZIP2, "ordinary zip"),  # Python cannot limit its output
        ([("lab-01.py", bytes(1000))], zipfile.ZIP_LZMA, "ordinary zip"),
        ([(f"{n}", b"") for n in range(10_001)], zipfile.ZIP_DEFLATED, "more than 10,000 files"),
        # The list of these is never parsed.
        ([(f"{n:0300}", b"") for n in range(14_000)], zipfile.ZIP_DEFLATED, "more than 10,000 files"),
    ],
    ids=["a link", "a bomb", "bzip2", "lzma", "too many", "too long a list"],
)
def test_a_zip_that_is_refused_by_its_list(tmp_path, members, method, why):
    found = read_zip(tmp_path, members, method)
    assert not found.files and why in found.problems["lab-01"]


def test_a_zip_with_a_false_size_gives_no_more_than_that(tmp_path):
    path = zipped(tmp_path / "a.zip", [("lab-01.py", bytes(40 << 20)), ("lab-02.py", b"two")])
    path.write_bytes(path.read_bytes().replace(struct.pack("<L", 40 << 20), struct.pack("<L", 100)))
    found = read_zip(tmp_path)
    assert "cannot be read" in found.problems["lab-01"] and found.files == {"lab-02": b"two"}


@pytest.mark.parametrize("data", [b"", b"PK", b"no zip", b"PK\5\6" + b"\xff" * 18, b"PK\3\4" + bytes(100)])
def test_a_damaged_zip_is_a_problem_in_words(tmp_path, data):
    (tmp_path / "a.zip").write_bytes(data)
    found = read_zip(tmp_path)
    assert found.problems == dict.fromkeys(LABS, "the file is not a zip, or it is damaged")


def test_a_zip_cut_short_or_with_any_byte_changed_never_raises(tmp_path):
    members = {"lab-01.py": b"one" * 50}
    whole = zipped(tmp_path / "a.zip", members.items()).read_bytes()
    cut = [whole[:end] for end in range(0, len(whole), 7)]
    changed = [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(len(whole))]
    for data in [*cut, *changed]:
        (tmp_path / "a.zip").write_bytes(data)
        files = read_zip(tmp_path).files
        assert not files or files == {"lab-01": members["lab-01.py"]} and data in changed


# ------------------------------------------------------------------------------------------------- students


def test_students_come_by_name_and_other_files_are_listed(tmp_path):
    for name in ("bob", "ann", ".git", "__MACOSX"):
        (tmp_path / name).mkdir()
    zipped(tmp_path / "Cy.ZIP", [])
    (tmp_path / "grades.xlsx").write_text("")
    (tmp_path / "submission_metadata.yml").write_text("")
    entries, others = intake.entries(tmp_path)
    assert [entry.student for entry in entries] == ["Cy", "ann", "bob"]
    assert others == {"grades.xlsx": intake.NO_CLASS}


@pytest.mark.parametrize(
    "names, why",
    [(["ann/", "ann.zip"], "the same student's"), ([], "holds no submissions"), (None, "is not a folder"),
     (["lab-01/"], "the folder above it")],
)  # fmt: skip
def test_folders_that_hold_no_class_are_refused(tmp_path, names, why):
    for name in names or ():
        (tmp_path / name).mkdir() if name.endswith("/") else zipped(tmp_path / name, [])
    with pytest.raises(LabError, match=why):
        intake.entries(tmp_path if names is not None else tmp_path / "none")


def test_two_folders_that_differ_in_case_are_two_students(tmp_path):
    for name in ("ann", "Ann", "ANN"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lab-01.py").write_text(name)
    found = read_class(tmp_path)
    assert {one.files["lab-01"] for one in found.values()} == {b"ann", b"Ann", b"ANN"}
    assert len({student.casefold() for student in found}) == 3 and found["ANN"].files["lab-01"] == b"ANN"


def test_loose_files_as_canvas_names_them(tmp_path):
    files = {
        "student01_1_2_lab-01.py": "one", "student01_1_3_lab-02-1.py": "two",
        "student02_LATE_77_5_lab1.py": "late", "smithann_8_6_lab-01.py": "8", "smithann_9_7_lab-01.py": "9",
        "student01_1_4_notes.txt": "", "student03.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    zipped(tmp_path / "student04_4_8_mine.zip", [("Lab-02/starter.py", b"zip")])
    (tmp_path / "student05_5_9_lab-01.py").symlink_to(tmp_path / "student03.py")
    found = read_class(tmp_path)
    assert {student: one.files for student, one in found.items()} == {
        "student01": {"lab-01": b"one", "lab-02": b"two"},
        "student02": {"lab-01": b"late"},
        "smithann_8": {"lab-01": b"8"},
        "smithann_9": {"lab-01": b"9"},
        "student04": {"lab-02": b"zip"},
        "student05": {},
    }
    assert found["student01"].ignored == ["notes.txt"] and "symbolic link" in found["student05"].ignored[0]
    assert intake.entries(tmp_path)[1] == {"student03.py": intake.NO_CLASS}


def test_folders_as_moodle_names_them(tmp_path):
    for name in ("Ann Example_12_assignsubmission_file_", "Bo_B_3_assignsubmission_file"):
        (tmp_path / name).mkdir()
        zipped(tmp_path / name / "mine.zip", [("lab-01.py", name.encode()[:2])])
    (tmp_path / "Ann Example_12_assignsubmission_onlinetext_").mkdir()
    (tmp_path / "Cy_4_assignsubmission_file_lab-02.py").write_text("two")
    found = read_class(tmp_path)
    files = {student: one.files for student, one in found.items()}
    assert files == {"Ann Example": {"lab-01": b"An"}, "Bo_B": {"lab-01": b"Bo"}, "Cy": {"lab-02": b"two"}}


# ------------------------------------------------------------------------------------- encodings, notebooks


def test_a_coding_cookie_counts_as_it_does_for_python(read):
    cookie = "# -*- coding: latin-1 -*-\nname = 'Zoë'\n"
    found = read({"lab-01.py": cookie.encode("latin-1"), "lab-02.py": b"# coding: punycode\nx = 1\n"})
    assert found.files == {"lab-01": cookie.encode()} and "punycode" in found.problems["lab-02"]
    unknown = read({"lab-01.py": b"# coding: klingon\n", "lab-02.py": b"# coding: rot13\n"})
    why = unknown.problems["lab-01"]
    assert "an encoding that is not read: " in why and "klingon" in why
    assert "rot13" in unknown.problems["lab-02"] and not unknown.files


def notebook(*sources):
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": ["def clamp():"]}, *cells]}).encode()


def test_of_a_notebook_the_cells_with_the_tasks_are_graded(read):
    task = "%%time\ndef clamp(*values):\n    return helper(values)\n"
    others = ["import matplotlib\nclamp(1)", "!pip install x", "print(clamp(1, 2, 3))", "def broken(:"]
    found = read({"lab-02.ipynb": notebook(task, *others, "def helper(values):\n    return 7\n")})
    source = found.files["lab-02"].decode()
    module = {}
    exec(source, module)
    assert module["clamp"](1, 2, 3) == 7 and "matplotlib" not in source and "broken" not in source
    with pytest.raises(NotImplementedError):  # of the starter: the tasks that no cell has
        module["next_chunk"](None, 1)


@pytest.mark.parametrize(
    "data, why",
    [(b"{", "is not a notebook"), (b"[" * 100_000, "is not a notebook"), (b'{"cells": [5]}', "is not a"),
     (notebook("clamp = 1"), "has no cell with one of the tasks: clamp, next_chunk, prefill_budget"),
     (notebook(solution("lab-02")), "the course's own file")],
)  # fmt: skip
def test_a_notebook_that_is_not_graded_has_a_reason(read, data, why):
    found = read({"lab-02.ipynb": data})
    assert not found.files and why in found.problems["lab-02"]


@pytest.mark.parametrize("name", ["ann", "Zoë Müller", "submission_123", "a.b+c@d.org", "王伟"])
def test_names_that_a_file_can_have_stay(name):
    assert safe(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "a\nb", "a\0b", "=1+1", "-x", "<b>", "CON", "nul.txt", "index", "a ",
     "x" * 300, "\udcff"],
)  # fmt: skip
def test_other_names_become_different_names_that_a_file_can_have(name):
    made = safe(name)
    assert made != name and made == safe(name) == safe(made) and made != safe(name + "!")
    assert not set(made) & set('/\\\0\n:<>"|?*') and len(made.encode()) < 200 and made[0] not in ".-=+@ "
