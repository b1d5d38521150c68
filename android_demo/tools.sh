#!/usr/bin/env bash
# What an APK is made with, into build/android/tools: bash android_demo/tools.sh
#   onnxruntime.aar    onnxruntime's Java classes and native libraries, from npm, verified
#   android.jar dx.jar the framework's classes and the compiler to dex, from Debian's previous release: downloaded by apt
#                      with a source list of its own, so signatures are checked and nothing else is taken from there
# aapt2, zipalign, apksigner, ASM and a JDK are installed from the machine's own Debian where they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=$PWD/build/android/tools
ORT_PACKAGE=com.github.asus4.onnxruntime@0.4.9  # onnxruntime 1.29.0 as Microsoft built it for Android
ORT_FILE=package/Plugins/Android/onnxruntime.aar
ORT_SHA256=98cddbac92640b4a6af72a03c42e0491851f366d3da66bbaeb5dd66310946cf2
PREVIOUS=bullseye
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
PREVIOUS_PACKAGES=(dalvik-exchange libandroid-23-java)

fail() { echo "error: $*" >&2; exit 2; }

install_commands() {
    local missing=()
    for pair in aapt2:aapt zipalign:zipalign apksigner:apksigner javac:default-jdk-headless zip:zip unzip:unzip; do
        command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
    done
    [ -f /usr/share/java/asm.jar ] || missing+=(libasm-java)
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get > /dev/null || fail "${missing[*]}: not installed, and this is no Debian; install them by hand"
    [ "$(id -u)" = 0 ] || fail "${missing[*]}: not installed; run: sudo apt-get install ${missing[*]}"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}

fetch_onnxruntime() {
    [ -f "$OUT/onnxruntime.aar" ] && return
    command -v npm > /dev/null || fail "npm: not installed; the onnxruntime library comes from there"
    local folder
    folder=$(mktemp -d "$OUT/npm.XXXX")
    (cd "$folder" && npm pack --silent "$ORT_PACKAGE" > /dev/null && tar xzf ./*.tgz "$ORT_FILE")
    echo "$ORT_SHA256  $folder/$ORT_FILE" | sha256sum --check --quiet ||
        fail "$ORT_PACKAGE: its library is not the one that this app was made for"
    mv "$folder/$ORT_FILE" "$OUT/onnxruntime.aar"
    rm -r "$folder"
}

fetch_previous_release() {
    [ -f "$OUT/dx.jar" ] && [ -f "$OUT/android.jar" ] && return
    local apt=$OUT/apt site
    site=$(debian_site)
    [ -n "$site" ] || fail "no list of Debian's main packages is here, beside which $PREVIOUS is looked for; run: apt-get update"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/root"
    echo "deb [signed-by=$KEYRING] $site $PREVIOUS main" > "$apt/sources.list"
    local own=(-o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User="$(id -un)")
    apt-get "${own[@]}" -q update
    (cd "$apt" && apt-get "${own[@]}" -q download "${PREVIOUS_PACKAGES[@]}")
    for package in "$apt"/*.deb; do dpkg-deb -x "$package" "$apt/root"; done
    cp "$apt/root/usr/share/java/com.android.android-23.jar" "$OUT/android.jar"
    cp "$apt/root/usr/share/java/com.android.dx.jar" "$OUT/dx.jar"
    rm -r "$apt"
}

# Of the machine's source of its own release, not of its updates.
debian_site() {
    apt-get indextargets --format '$(ORIGIN)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' |
        grep -E '^Debian\|[a-z]+\|main\|' | head -n 1 | cut -d '|' -f 4
}

mkdir -p "$OUT"
install_commands
fetch_onnxruntime
fetch_previous_release
