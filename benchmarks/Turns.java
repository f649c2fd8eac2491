package peers;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;

/** One Flink job for each line of settings, k=v k=v …, as FlinkBench takes them; answers with the seconds from its first
 *  row to its end, the last commit included. */
public class Turns {
  public static void main(String[] none) throws Exception {
    var lines = new BufferedReader(new InputStreamReader(System.in));
    String line;
    for (int job = 0; (line = lines.readLine()) != null; job++) {
      Map<String, String> settings = new HashMap<>();
      for (String one : line.split(" ")) settings.put(one.substring(0, one.indexOf('=')), one.substring(one.indexOf('=') + 1));
      FlinkBench.first = 0;
      FlinkBench.last.set(0);
      double[] seconds = FlinkBench.one(settings.get("mode"), Long.parseLong(settings.get("n")), settings, job);
      System.out.printf(Locale.ROOT, "SECONDS %.6f%n", seconds[1]);
      System.out.flush();
    }
    System.exit(0);
  }
}
