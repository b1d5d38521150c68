#!/usr/bin/env bash
# The APK, without Gradle: bash android_demo/build.sh -> build/android/gemma4-mtp.apk
# Signed with a key that is made for this build and thrown away: for trying, not for a store.
set -euo pipefail
cd "$(dirname "$0")/.."
bash android_demo/tools.sh

TOOLS=$PWD/build/android/tools
OUT=$PWD/build/android/app
APK=$PWD/build/android/gemma4-mtp.apk
ABIS=(arm64-v8a x86_64)
ASM=/usr/share/java/asm.jar:/usr/share/java/asm-tree.jar
MIN_SDK=26

rm -rf "$OUT" "$APK"
mkdir -p "$OUT"/{aar,lower,library,res,gen,classes,apk}

# onnxruntime's classes are of Java 17, dx reads those of Java 8. Its telemetry is left out: the app has no network.
unzip -q "$TOOLS/onnxruntime.aar" classes.jar "jni/*" -d "$OUT/aar"
javac -cp "$ASM" -d "$OUT/lower" android_demo/lower/Lower.java
java -cp "$OUT/lower:$ASM" Lower "$OUT/aar/classes.jar" "$OUT/library/onnxruntime.jar" \
    ai/onnxruntime/telemetry/ ai/onnxruntime/TelemetryInitializer

aapt2 compile --dir android_demo/app/res -o "$OUT/res/compiled.zip"
aapt2 link -o "$OUT/resources.apk" -I "$TOOLS/android.jar" --manifest android_demo/app/AndroidManifest.xml \
    --java "$OUT/gen" --auto-add-overlay "$OUT/res/compiled.zip"

find android_demo/core/src android_demo/app/{plain,onnxruntime,src} "$OUT/gen" -name '*.java' > "$OUT/sources"
javac -Xlint:all,-options,-deprecation -Werror -source 8 -target 8 -bootclasspath "$TOOLS/android.jar" \
    -cp "$OUT/library/onnxruntime.jar" -d "$OUT/classes" "@$OUT/sources"
java -cp "$TOOLS/dx.jar" com.android.dx.command.Main --dex "--min-sdk-version=$MIN_SDK" "--output=$OUT/apk/classes.dex" \
    "$OUT/classes" "$OUT/library/onnxruntime.jar"

for abi in "${ABIS[@]}"; do
    mkdir -p "$OUT/apk/lib/$abi"
    cp "$OUT/aar/jni/$abi"/*.so "$OUT/apk/lib/$abi/"
done
cp "$OUT/resources.apk" "$OUT/unaligned.apk"
# As they are, so that the system maps them from the APK and loads no copy.
(cd "$OUT/apk" && zip -q -X "$OUT/unaligned.apk" classes.dex && zip -q -X -0 -r "$OUT/unaligned.apk" lib)
python3 android_demo/align.py "$OUT/unaligned.apk" "$OUT/aligned.apk"

keytool -genkeypair -keystore "$OUT/key.jks" -storepass throwaway -keypass throwaway -alias key -keyalg RSA -keysize 2048 \
    -validity 10000 -dname CN=throwaway > /dev/null 2>&1
apksigner sign --ks "$OUT/key.jks" --ks-pass pass:throwaway --min-sdk-version "$MIN_SDK" --out "$APK" "$OUT/aligned.apk"
rm "$OUT/key.jks"
zipalign -c -p 4 "$APK"
echo "$APK: $(($(stat -c %s "$APK") / 1000000)) MB, ${ABIS[*]}"
