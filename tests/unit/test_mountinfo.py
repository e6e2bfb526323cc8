"""The table of mounts: what its lines mean, and which of the mounts in it can really be seen."""

import os

import pytest

from elsewhere.linux import mountinfo
from elsewhere.linux.mountinfo import Mount

SERVER = r"""
22 27 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
23 27 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:14 - proc proc rw
24 27 0:5 / /dev rw,nosuid,relatime shared:2 - devtmpfs udev rw,size=4012336k,mode=755
25 24 0:22 / /dev/pts rw,nosuid,noexec,relatime shared:3 - devpts devpts rw,gid=5,mode=620,ptmxmode=000
26 27 0:23 / /run rw,nosuid,nodev,noexec,relatime shared:5 - tmpfs tmpfs rw,size=808348k,mode=755
27 1 253:1 / / rw,relatime shared:1 - ext4 /dev/mapper/vg-root rw,errors=remount-ro
31 26 0:26 / /run/lock rw,nosuid,nodev,noexec,relatime shared:6 - tmpfs tmpfs rw,size=5120k
90 27 0:40 /@home /home rw,relatime shared:44 master:3 propagate_from:2 - btrfs /dev/sdb1 rw,subvol=/@home
"""


def table(*lines: str) -> str:
    """`id parent target` for each mount, filled up to whole lines."""
    return "".join(
        f"{number} {parent} 0:{number} / {target} rw - tmpfs tmpfs rw\n"
        for number, parent, target in (line.split(" ") for line in lines)
    )


def seen(*lines: str) -> list[int]:
    return [mount.id for mount in mountinfo.parse(table(*lines))]


def test_every_field_of_a_line_is_read() -> None:
    assert mountinfo.parse(SERVER.lstrip())[-1] == Mount(
        id=90,
        parent=27,
        device="0:40",
        root="/@home",
        target="/home",
        options=frozenset({"rw", "relatime"}),
        kind="btrfs",
        source="/dev/sdb1",
    )


def test_a_table_without_anything_over_mounted_is_seen_whole_and_in_its_order() -> None:
    expected = ["/sys", "/proc", "/dev", "/dev/pts", "/run", "/", "/run/lock", "/home"]
    assert [mount.target for mount in mountinfo.parse(SERVER.lstrip())] == expected


def test_an_empty_table_has_no_mounts() -> None:
    assert mountinfo.parse("") == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"/my\040disk", "/my disk"),
        (r"/a\011b", "/a\tb"),
        (r"/a\012b", "/a\nb"),
        (r"/a\134b", "/a\\b"),
        (r"/a\134040b", "/a\\040b"),
        (r"/a\134134b", "/a\\134b"),
        (r"/a\040\040\012b", "/a  \nb"),
        ("/plain", "/plain"),
        ("/\u00fc", "/\u00fc"),
        ("/\udcff", "/\udcff"),
        ("/a\rb", "/a\rb"),
        ("/a\x0b\x0c\x1cb", "/a\x0b\x0c\x1cb"),
        ("/a\x85\u2028b", "/a\x85\u2028b"),
    ],
)
def test_unusual_characters_in_a_place_are_understood_as_the_kernel_writes_them(written: str, meant: str) -> None:
    text = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:2 {written} {written} rw - ext4 {written} rw\n"
    mount = mountinfo.parse(text)[-1]
    assert (mount.target, mount.root, mount.source) == (meant, meant, meant)


def test_a_hash_in_a_source_is_understood_as_the_kernel_writes_it() -> None:
    (mount,) = mountinfo.parse("1 0 0:9 / / rw - cifs //server/share\\0431 rw\n")
    assert mount.source == "//server/share#1"


def test_a_mount_without_a_source_and_with_a_subtype_is_read() -> None:
    (mount,) = mountinfo.parse("1 0 0:9 / / rw - fuse.sshfs  rw\n")
    assert (mount.kind, mount.source) == ("fuse.sshfs", "")


def test_what_is_mounted_over_at_its_own_place_is_hidden() -> None:
    assert seen("1 0 /", "2 1 /a", "3 2 /a", "4 3 /a") == [1, 4]


def test_what_stands_on_a_mount_that_is_hidden_is_hidden_too() -> None:
    assert seen("1 0 /", "2 1 /a", "3 2 /a/b", "4 2 /a") == [1, 4]


def test_what_stands_on_the_mount_that_hides_is_seen() -> None:
    assert seen("1 0 /", "2 1 /a", "3 2 /a", "4 3 /a/b", "5 4 /a/b/c") == [1, 3, 4, 5]


def test_a_mount_made_later_further_up_hides_what_was_below() -> None:
    assert seen("1 0 /", "2 1 /a/b", "3 2 /a/b/c", "4 1 /a") == [1, 4]


def test_a_new_root_hides_everything_that_stood_on_the_old_one() -> None:
    assert seen("1 1 /", "2 1 /dev", "3 1 /", "4 3 /dev") == [3, 4]


def test_a_sibling_whose_name_only_begins_alike_hides_nothing() -> None:
    assert seen("1 0 /", "2 1 /ab/c", "3 1 /a") == [1, 2, 3]


def test_a_hidden_mount_hides_nothing_itself() -> None:
    """/a covers the mount on /a/b; what is mounted below the new /a/b afterwards does not stand on the hidden one."""
    assert seen("1 0 /", "2 1 /a/b", "3 1 /a", "4 3 /a/b/c") == [1, 3, 4]


def test_a_mount_that_was_moved_counts_where_it_stands_now_not_by_its_age() -> None:
    assert seen("1 0 /", "2 4 /a/b", "3 2 /a/b/c", "4 1 /a", "5 1 /a/b") == [1, 2, 3, 4]


def test_in_a_changed_root_mounts_whose_parents_are_out_of_sight_are_seen() -> None:
    assert seen("7 3 /proc", "8 3 /data", "9 8 /data/x", "10 9 /data/x/y") == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/", 27),
        ("/etc/passwd", 27),
        ("/devices", 27),
        ("/dev", 24),
        ("/dev/null", 24),
        ("/dev/pts", 25),
        ("/dev/pts/0", 25),
        ("/run/lock/x", 31),
        ("/run/locked", 26),
        ("/home", 90),
    ],
)
def test_a_path_lies_on_the_mount_with_the_longest_matching_place(path: str, number: int) -> None:
    assert mountinfo.containing(path, mountinfo.parse(SERVER.lstrip())).id == number


def test_without_a_mount_that_contains_it_a_path_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match="/elsewhere"):
        mountinfo.containing("/elsewhere", mountinfo.parse(table("2 1 /a")))


def test_every_mount_that_is_said_to_be_seen_here_really_is() -> None:
    mounts = mountinfo.read()
    assert mounts
    for mount in mounts:
        try:
            found = os.lstat(mount.target)
        except PermissionError:
            continue
        major, minor = map(int, mount.device.split(":"))
        # btrfs and overlay show other device numbers for files than for their mounts.
        if mount.kind not in ("btrfs", "overlay"):
            assert (os.major(found.st_dev), os.minor(found.st_dev)) == (major, minor), mount


def test_a_path_here_lies_on_the_mount_whose_device_it_has() -> None:
    for path in ("/", "/proc", "/proc/self", "/dev/null"):
        real = os.path.realpath(path)
        mount = mountinfo.containing(real, mountinfo.read())
        if mount.kind not in ("btrfs", "overlay"):
            found = os.lstat(os.path.dirname(real) if path == "/dev/null" else real).st_dev
            assert mount.device == f"{os.major(found)}:{os.minor(found)}" or path == "/dev/null"
