package gemma4.mtp.app;

import android.app.ActivityManager;
import android.content.Context;
import gemma4.mtp.Memory;

/** Memory and graphs of this device. */
final class AndroidDevice implements Device {
    private final ActivityManager activities;

    AndroidDevice(Context context) {
        activities = (ActivityManager) context.getSystemService(Context.ACTIVITY_SERVICE);
    }

    /** The one place to change for graphs of another backend, such as ExecuTorch. */
    @Override
    public Device.Graphs graphs(int threads) {
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

    @Override
    public long residentBytes() {
        return Memory.residentBytes();
    }
}
