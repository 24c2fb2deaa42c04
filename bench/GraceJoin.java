import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Joined;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.processor.TimestampExtractor;
import org.apache.kafka.streams.state.Stores;

/** The peer: a stream joined with a versioned table, with grace, out to a topic; prints its seconds.
 *  SERVERS STREAM TABLE OUT EXPECTED RETENTION_MS GRACE_MS STATE_DIR APPLICATION_ID */
public class GraceJoin {
  public static void main(String[] a) throws Exception {
    long expected = Long.parseLong(a[4]);
    Properties p = new Properties();
    p.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, a[0]);
    p.put(StreamsConfig.APPLICATION_ID_CONFIG, a[8]);
    p.put(StreamsConfig.STATE_DIR_CONFIG, a[7]);
    p.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
    p.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
    p.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.String().getClass());
    p.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.String().getClass());
    p.put("auto.offset.reset", "earliest");
    StreamsBuilder b = new StreamsBuilder();
    TimestampExtractor time = (r, before) -> {
      String v = (String) r.value();
      return Long.parseLong(v.substring(v.lastIndexOf(':') + 1, v.length() - 1));
    };
    Consumed<String, String> consumed =
        Consumed.with(Serdes.String(), Serdes.String()).withTimestampExtractor(time);
    KTable<String, String> table = b.table(a[2], consumed, Materialized.as(
        Stores.persistentVersionedKeyValueStore("t", Duration.ofMillis(Long.parseLong(a[5])))));
    KStream<String, String> stream = b.stream(a[1], consumed);
    AtomicLong seen = new AtomicLong();
    AtomicLong last = new AtomicLong();
    stream.leftJoin(table, (v, w) -> v + w,
            Joined.with(Serdes.String(), Serdes.String(), Serdes.String(), "j",
                Duration.ofMillis(Long.parseLong(a[6]))))
        .peek((k, v) -> { seen.incrementAndGet(); last.set(System.nanoTime()); })
        .to(a[3], Produced.with(Serdes.String(), Serdes.String()));
    long start = System.nanoTime();
    KafkaStreams streams = new KafkaStreams(b.build(), p);
    streams.start();
    while (seen.get() < expected && (seen.get() == 0 || System.nanoTime() - last.get() < 10_000_000_000L)) {
      Thread.sleep(20);
    }
    System.out.println("joined " + seen.get() + " seconds " + (last.get() - start) / 1e9);
    Runtime.getRuntime().halt(0);
  }
}
