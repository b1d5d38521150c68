package gemma4.mtp.app;

import android.app.Application;
import android.content.Context;
import android.content.SharedPreferences;
import android.os.Handler;
import android.os.Looper;
import java.io.File;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executor;

/** The process: one engine for all screens, and what is kept from run to run. */
public final class App extends Application {
    /** Names of the settings, as Settings reads them. */
    static final String[] FIELDS = {"drafting", "draft_tokens", "temperature", "top_k", "top_p", "threads", "context"};

    private Engine engine;

    @Override
    public void onCreate() {
        super.onCreate();
        final Handler main = new Handler(Looper.getMainLooper());
        engine = new Engine(new AndroidDevice(this), new Executor() {
            @Override
            public void execute(Runnable work) {
                main.post(work);
            }
        });
        engine.delete(BundleImport.remains(importRoot())); // of a process that was killed
    }

    Engine engine() {
        return engine;
    }

    /** Where imports go: nobody else can change files there. */
    File importRoot() {
        return new File(getFilesDir(), "bundles");
    }

    /** Where a computer may push bundles, or null where there is no such place. */
    File pushRoot() {
        return getExternalFilesDir("bundles");
    }

    List<File> bundles() {
        return Bundles.in(importRoot(), pushRoot());
    }

    private SharedPreferences preferences() {
        return getSharedPreferences("settings", Context.MODE_PRIVATE);
    }

    Map<String, String> fields() {
        Map<String, String> fields = new HashMap<>();
        for (String name : FIELDS) {
            fields.put(name, preferences().getString(name, ""));
        }
        return fields;
    }

    /** What was stored has been checked before. */
    Settings settings() {
        return new Settings(fields());
    }

    void store(Map<String, String> fields) {
        SharedPreferences.Editor editor = preferences().edit();
        for (String name : FIELDS) {
            editor.putString(name, fields.get(name));
        }
        editor.apply();
    }

    /** The one that was loaded last, or null. */
    File lastBundle() {
        String path = preferences().getString("bundle", null);
        return path == null ? null : new File(path);
    }

    void storeLastBundle(File bundle) {
        preferences().edit().putString("bundle", bundle.getPath()).apply();
    }
}
