#!/usr/bin/env bash
# The app as a signed APK, build/android/gemma4-mtp.apk: bash android_demo/build.sh
# Every step is one command of the Android tools; tools.sh brings them.
set -euo pipefail
cd "$(dirname "$0")/.."
bash android_demo/tools.sh

OUT=$PWD/build/android
TOOLS=$OUT/tools
WORK=$OUT/work
APK=$OUT/gemma4-mtp.apk
KEY=$OUT/throw-away.keystore
ASM=/usr/share/java/asm.jar:/usr/share/java/asm-tree.jar
ABIS=(arm64-v8a x86_64)
# Without what sends usage data: nothing would start it, and the app may not use the network.
LEFT_OUT=(ai/onnxruntime/telemetry/ ai/onnxruntime/TelemetryInitializer)

compile_java() { # CLASSPATH FOLDER SOURCE..: as Java 8, against Android's own classes, so that nothing newer is used
    local classpath=$1 folder=$2
    shift 2
    mkdir -p "$folder"
    javac -encoding UTF-8 -Xlint:all,-options -Werror -source 8 -target 8 -bootclasspath "$TOOLS/android.jar" \
        -classpath "$classpath" -d "$folder" "$@"
}

rm -rf "$WORK" "$APK"
mkdir -p "$WORK/lib" "$WORK/desugar" "$WORK/generated"

unzip -q -o "$TOOLS/onnxruntime.aar" classes.jar $(printf 'jni/%s/*.so ' "${ABIS[@]}") -d "$WORK"
for abi in "${ABIS[@]}"; do mv "$WORK/jni/$abi" "$WORK/lib/"; done

javac -Xlint:all -Werror -classpath "$ASM" -d "$WORK/desugar" android_demo/desugar/Desugar.java
java -classpath "$WORK/desugar:$ASM" Desugar "$WORK/classes.jar" "$WORK/onnxruntime.jar" "${LEFT_OUT[@]}"

aapt2 compile --dir android_demo/app/res -o "$WORK/res.zip"
aapt2 link -I "$TOOLS/android.jar" --manifest android_demo/app/AndroidManifest.xml --java "$WORK/generated" \
    -o "$WORK/resources.apk" "$WORK/res.zip"

mapfile -t SOURCES < <(find android_demo/core/src android_demo/app/plain android_demo/app/src "$WORK/generated" -name '*.java')
compile_java "$WORK/onnxruntime.jar" "$WORK/classes" "${SOURCES[@]}"
java -jar "$TOOLS/dx.jar" --dex --min-sdk-version=26 --output="$WORK/classes.dex" "$WORK/classes" "$WORK/onnxruntime.jar"

python3 android_demo/pack.py "$WORK/unsigned.apk" "$WORK/resources.apk" "$WORK/classes.dex" "$WORK/lib"
[ -f "$KEY" ] || keytool -genkeypair -keystore "$KEY" -storepass throw-away -alias key -keyalg RSA -keysize 2048 \
    -validity 10000 -dname 'CN=throw-away' 2> /dev/null
apksigner sign --ks "$KEY" --ks-pass pass:throw-away --min-sdk-version 26 --v1-signing-enabled false --v4-signing-enabled false \
    --out "$APK" "$WORK/unsigned.apk"
zipalign -c 16384 "$APK" || { echo "error: $APK: libraries do not lie on page bounds" >&2; exit 2; }

echo "$APK: $(stat -c %s "$APK") bytes, of which native libraries $(cat "$WORK"/lib/*/*.so | wc -c); ${ABIS[*]}"
