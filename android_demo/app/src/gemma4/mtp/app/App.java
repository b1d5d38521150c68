package gemma4.mtp.app;

import android.app.Application;

/** Holds the engine, which outlives screens. */
public final class App extends Application {
    private Settings settings;
    private Engine engine;

    @Override
    public void onCreate() {
        super.onCreate();
        settings = new Settings(this);
        engine = new Engine(this, settings);
    }

    Settings settings() {
        return settings;
    }

    Engine engine() {
        return engine;
    }
}
