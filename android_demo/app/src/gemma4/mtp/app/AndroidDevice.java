package gemma4.mtp.app;

import android.app.ActivityManager;
import android.content.Context;
import java.io.BufferedReader;
import java.io.FileReader;
import java.io.IOException;

/** Memory and graphs of this device. */
final class AndroidDevice implements Engine.Device {
    private final ActivityManager activities;

    AndroidDevice(Context context) {
        activities = (ActivityManager) context.getSystemService(Context.ACTIVITY_SERVICE);
    }

    /** The one place to change for graphs of another backend, such as ExecuTorch. */
    @Override
    public Engine.Graphs graphs(int threads) {
        return new OrtGraphs(threads);
    }

    /** Below the threshold the system begins to end apps. */
    @Override
    public long availableBytes() {
        ActivityManager.MemoryInfo info = new ActivityManager.MemoryInfo();
        activities.getMemoryInfo(info);
        return Math.max(0, info.availMem - info.threshold);
    }

    /** Direct buffers are Java memory on Android. */
    @Override
    public long heapBytes() {
        Runtime runtime = Runtime.getRuntime();
        return runtime.maxMemory() - (runtime.totalMemory() - runtime.freeMemory());
    }

    /** With mapped files, as far as they are in memory; 0 where the system does not tell. */
    @Override
    public long residentBytes() {
        try (BufferedReader status = new BufferedReader(new FileReader("/proc/self/status"))) {
            for (String line = status.readLine(); line != null; line = status.readLine()) {
                if (line.startsWith("VmRSS:")) {
                    return Long.parseLong(line.replaceAll("[^0-9]", "")) * 1024;
                }
            }
            return 0;
        } catch (IOException error) {
            return 0;
        }
    }
}
