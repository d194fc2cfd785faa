"""What is looked at of a submission, and what of it never is."""

import os
import stat
import struct
import zipfile

import pytest

from labs.kit.grader import intake
from labs.kit.judge.manifest import LabError

LABS = ("lab-01", "lab-02")


@pytest.fixture
def class_of(tmp_path):
    """Write a class, {student: {name: bytes}}, and read it: by student."""

    def made(**students):
        for student, files in students.items():
            for name, data in files.items():
                path = tmp_path / student / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        entries, _ = intake.entries(tmp_path)
        return {entry.student: intake.read(entry, LABS) for entry in entries}

    return made


def zipped(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def read_zip(path, members):
    return intake.read(intake.Entry("a", zipped(path / "a.zip", members)), LABS)


def test_a_folder_with_files_at_any_depth(class_of):
    found = class_of(ann={"course/labs/lab-01/starter.py": b"one", "lab_02.py": b"two", "notes.txt": b""})[
        "ann"
    ]
    assert found.files == {"lab-01": b"one", "lab-02": b"two"}
    assert found.ignored == ["notes.txt"] and not found.problems


@pytest.mark.parametrize("name", ["lab-01/starter.py", "x/lab_01/starter.py", "lab-01.py", "x/y/lab_01.py"])
def test_names_that_are_known(class_of, name):
    assert class_of(ann={name: b"one"})["ann"].files == {"lab-01": b"one"}


@pytest.mark.parametrize(
    "name",
    ["starter.py", "lab-1.py", "lab-01/starter.pyc", "lab-01/solution.py", "my-lab-01.py",
     "lab-01/x/starter.py", "conftest.py", "lab-01/pytest.ini", "lab-01/torch.py", "a.pth",
     "sitecustomize.py", "lab-01/test_lab.py"],
)  # fmt: skip
def test_all_else_is_listed_and_not_looked_at(class_of, name):
    found = class_of(ann={name: b"one"})["ann"]
    assert (found.files, found.problems, found.ignored) == ({}, {}, [name])


def test_a_lab_that_is_not_graded_is_listed(class_of):
    assert class_of(ann={"lab-07.py": b"x"})["ann"].ignored == ["lab-07.py: lab-07 is not graded here"]


def test_hidden_folders_are_not_looked_into(class_of, tmp_path):
    found = class_of(ann={".git/lab-01.py": b"x", "labs/.state/backups/lab-01/starter.py": b"y"})["ann"]
    assert not found.files
    assert [line.split(":")[0] for line in found.ignored] == [".git/", "labs/.state/"]
    again = read_zip(tmp_path, [("__MACOSX/lab-01/starter.py", b"x"), ("__MACOSX/b", b"x")])
    assert not again.files and again.ignored == ["__MACOSX/: a folder that is not looked into"]


# --------------------------------------------------------------------------------------- two files, one lab


def test_the_file_in_the_fewest_folders_is_taken_and_said(class_of):
    found = class_of(ann={"lab-01/starter.py": b"new", "old/lab-01/starter.py": b"old"})["ann"]
    assert found.files == {"lab-01": b"new"}
    assert found.ignored == ["old/lab-01/starter.py: lab-01/starter.py is taken for lab-01"]


def test_two_that_differ_equally_deep_are_refused(class_of):
    found = class_of(ann={"lab-01/starter.py": b"a", "lab-01.py": b"b"})["ann"]
    assert not found.files and "two files for this lab" in found.problems["lab-01"]
    assert class_of(bob={"lab-01/starter.py": b"a", "lab-01.py": b"a"})["bob"].files == {"lab-01": b"a"}


def test_a_zip_with_one_name_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        found = read_zip(tmp_path, [("lab-01.py", b"a"), ("lab-01.py", b"b"), ("lab-02.py", b"c")])
    assert found.files == {"lab-02": b"c"} and "two files" in found.problems["lab-01"]


# ----------------------------------------------------------------------------------------------- what is read


def test_utf_8_with_a_bom_is_read(class_of):
    assert (
        class_of(ann={"lab-01.py": b"\xef\xbb\xbfx = 1"})["ann"].files["lab-01"].decode("utf-8-sig")
        == "x = 1"
    )


@pytest.mark.parametrize(
    "data, why",
    [(b"", "empty"), (b"\xef\xbb\xbf \n", "empty"), (b"x = '\xe9'", "not UTF-8 text (at byte 5)"),
     ("x = 1".encode("utf-16"), "not UTF-8"), (b"#" * (intake.FILE + 1), "larger than 1 MB")],
)  # fmt: skip
def test_what_cannot_be_judged_is_a_problem_of_its_lab_alone(class_of, data, why):
    found = class_of(ann={"lab-01.py": data, "lab-02.py": b"two"})["ann"]
    assert why in found.problems["lab-01"] and found.files == {"lab-02": b"two"}


def test_a_sparse_file_of_10_gb_is_not_read(class_of, tmp_path):
    class_of(ann={"lab-01.py": b""})
    os.truncate(tmp_path / "ann" / "lab-01.py", 10 << 30)
    found = class_of()["ann"]
    assert "larger than 1 MB" in found.problems["lab-01"]


def test_symbolic_links_are_not_followed(class_of, tmp_path):
    (secret := tmp_path.parent / "secret").mkdir()
    (secret / "starter.py").write_text("secret")
    class_of(ann={"lab-02.py": b"two"})
    (tmp_path / "ann" / "lab-01.py").symlink_to(secret / "starter.py")
    (tmp_path / "ann" / "sub").mkdir()
    (tmp_path / "ann" / "sub" / "lab-01").symlink_to(secret)
    (tmp_path / "bob").symlink_to(secret)
    found = class_of()
    assert found["ann"].files == {"lab-02": b"two"}
    assert "symbolic link" in found["ann"].problems["lab-01"]
    assert [line.split(":")[0] for line in found["ann"].ignored] == ["lab-01.py", "sub/lab-01"]
    assert set(found["bob"].problems) == set(LABS) and "symbolic link" in found["bob"].problems["lab-01"]


def test_a_pipe_does_not_hold_the_grader_up(class_of, tmp_path):
    class_of(ann={"x": b""})
    os.mkfifo(tmp_path / "ann" / "lab-01.py")
    assert class_of()["ann"].ignored == ["lab-01.py: no file", "x"]


def test_names_with_a_line_end_are_refused_in_words_and_on_one_line(class_of):
    (line, other) = class_of(ann={"lab-01.py\n": b"x", "lab-01\n/starter.py": b"y"})["ann"].ignored
    assert "\n" not in line + other and "\\n" in line and "line end" in line


def test_too_many_files_are_refused(class_of, monkeypatch):
    monkeypatch.setattr(intake, "ENTRIES", 3)
    found = class_of(ann={f"{n}": b"" for n in range(4)})["ann"]
    assert "more than 3 files" in found.problems["lab-01"]


def test_what_is_ignored_is_listed_up_to_a_limit(class_of):
    ignored = class_of(ann={f"{n:03}": b"" for n in range(300)})["ann"].ignored
    assert len(ignored) == intake.LISTED + 1 and ignored[-1] == "and 100 more"


# ----------------------------------------------------------------------------------------------------- zips


def test_a_zip_is_read_like_a_folder(tmp_path):
    members = [("work/lab-01/starter.py", b"one"), ("lab_02.py", b"two"), ("conftest.py", b"x"), ("d/", b"")]
    found = read_zip(tmp_path, members)
    assert found.files == {"lab-01": b"one", "lab-02": b"two"} and found.ignored == ["conftest.py"]


def test_a_zip_from_windows(tmp_path):
    assert read_zip(tmp_path, [("work\\lab-01\\starter.py", b"one")]).files == {"lab-01": b"one"}


def test_a_folder_with_the_zip_that_was_handed_in(class_of, tmp_path):
    (tmp_path / "ann").mkdir()
    zipped(tmp_path / "ann" / "mine.zip", [("lab-01.py", b"one"), ("inner.zip", b"")])
    found = class_of()["ann"]
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
    found = intake.read(intake.Entry("a", path), LABS)
    assert not found.files and "\\x00" in found.ignored[0] and "NUL" in found.ignored[0]


def test_a_link_in_a_zip_is_not_followed(tmp_path):
    link = zipfile.ZipInfo("lab-01/starter.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    found = read_zip(tmp_path, [(link, "/etc/passwd")])
    assert not found.files and "symbolic link" in found.problems["lab-01"]


def test_a_zip_bomb_is_refused_by_what_it_says(tmp_path):
    found = read_zip(tmp_path, [(f"{n}", bytes(10 << 20)) for n in range(6)] + [("lab-01.py", b"x")])
    assert not found.files and "more than 50 MB" in found.problems["lab-01"]


def test_a_zip_that_lies_about_a_size_gives_no_more_than_it_says(tmp_path):
    path = zipped(tmp_path / "a.zip", [("lab-01.py", bytes(40 << 20)), ("lab-02.py", b"two")])
    path.write_bytes(path.read_bytes().replace(struct.pack("<L", 40 << 20), struct.pack("<L", 100)))
    found = intake.read(intake.Entry("a", path), LABS)
    assert "cannot be read" in found.problems["lab-01"] and found.files == {"lab-02": b"two"}


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_whose_output_python_cannot_limit_are_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as file:
        file.writestr("lab-01.py", bytes(1000))
    found = intake.read(intake.Entry("a", tmp_path / "a.zip"), LABS)
    assert "ordinary zip" in found.problems["lab-01"]


def test_a_zip_with_a_list_of_more_files_than_it_may_have(tmp_path):
    found = read_zip(tmp_path, [(f"{n:0300}", b"") for n in range(14_000)])  # its list is never parsed
    assert "more than 10,000 files" in found.problems["lab-01"]
    assert (
        "more than 10,000 files"
        in read_zip(tmp_path, [(f"{n}", b"") for n in range(10_001)]).problems["lab-01"]
    )


@pytest.mark.parametrize("data", [b"", b"PK", b"no zip", b"PK\5\6" + b"\xff" * 18, b"PK\3\4" + bytes(100)])
def test_a_damaged_zip_is_a_problem_in_words(tmp_path, data):
    (tmp_path / "a.zip").write_bytes(data)
    found = intake.read(intake.Entry("a", tmp_path / "a.zip"), LABS)
    assert set(found.problems) == set(LABS) and found.problems["lab-01"]


def test_a_zip_cut_short_anywhere_never_raises(tmp_path):
    whole = zipped(tmp_path / "a.zip", [("lab-01.py", b"one" * 50), ("lab-02.py", b"two")]).read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / "a.zip").write_bytes(whole[:end])
        assert not intake.read(intake.Entry("a", tmp_path / "a.zip"), LABS).files


def test_a_zip_with_any_byte_changed_never_raises(tmp_path):
    whole = zipped(tmp_path / "a.zip", [("lab-01.py", b"one" * 50)]).read_bytes()
    for at in range(len(whole)):
        (tmp_path / "a.zip").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        found = intake.read(intake.Entry("a", tmp_path / "a.zip"), LABS)
        assert found.files in ({}, {"lab-01": b"one" * 50})


# ------------------------------------------------------------------------------------------------- who is who


def test_students_come_by_name_and_other_files_are_said(tmp_path):
    for name in ("bob", "ann", ".git", "__MACOSX"):
        (tmp_path / name).mkdir()
    zipped(tmp_path / "Cy.ZIP", [])
    (tmp_path / "grades.xlsx").write_text("")
    (tmp_path / "submission_metadata.yml").write_text("")
    entries, others = intake.entries(tmp_path)
    assert [entry.student for entry in entries] == ["Cy", "ann", "bob"] and others == ["grades.xlsx"]


def test_one_student_twice_is_refused(tmp_path):
    (tmp_path / "ann").mkdir()
    zipped(tmp_path / "Ann.zip", [])
    with pytest.raises(LabError, match="one student's"):
        intake.entries(tmp_path)


def test_folders_that_hold_no_class_are_refused(tmp_path):
    with pytest.raises(LabError, match="holds no submissions"):
        intake.entries(tmp_path)
    with pytest.raises(LabError, match="is no folder"):
        intake.entries(tmp_path / "none")
    (tmp_path / "lab-01").mkdir()
    with pytest.raises(LabError, match="the folder above it"):
        intake.entries(tmp_path)


@pytest.mark.parametrize("name", ["ann", "Zoë Müller", "submission_123", "a.b+c@d.org", "王伟"])
def test_names_that_a_file_can_have_stay(name):
    assert intake.safe(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "a\nb", "a\0b", "=1+1", "-x", "<b>", "CON", "nul.txt", "a ", "x" * 300, "\udcff"],
)  # fmt: skip
def test_other_names_become_one_that_a_file_can_have_and_differ(name):
    made = intake.safe(name)
    assert made != name and made == intake.safe(name) and made != intake.safe(name + "!")
    assert not set(made) & set('/\\\0\n:<>"|?*') and len(made.encode()) < 200 and made[0] not in ".-=+@ "
